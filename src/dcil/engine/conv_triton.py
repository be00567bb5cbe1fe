"""3x3 convolution of narrow images (Triton, channels innermost): an implicit matrix product, tap by tap.

cuDNN's kernels are made for wide layers: at 16 to 64 channels they take three times as long as reading and writing
the images does. Stride 1 and padding 1 only; then the gradient of the input is the same product with mirrored taps.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

WIDTHS = (16, 32, 64)
#: Channels -> rows per product, parts, warps, stages.
WEIGHT_TILES = {16: (128, 132, 4, 3), 32: (64, 132, 4, 3), 64: (64, 32, 8, 3)}


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _convolve(x, weight, y, rows, step_in, step_out, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,  # type: ignore[no-untyped-def]
              IN: tl.constexpr, OUT: tl.constexpr, R: tl.constexpr, MIRRORED: tl.constexpr):  # fmt: skip
    r = tl.program_id(0) * R + tl.arange(0, R)
    across, down = r % WIDTH, (r // WIDTH) % HEIGHT
    i, o = tl.arange(0, IN), tl.arange(0, OUT)
    inside = tl.where(r < rows, 0b111111111, 0)  # a bit for every tap: does it lie inside of the image?
    inside = tl.where(down > 0, inside, inside & 0b111111000)
    inside = tl.where(down < HEIGHT - 1, inside, inside & 0b000111111)
    inside = tl.where(across > 0, inside, inside & 0b110110110)
    inside = tl.where(across < WIDTH - 1, inside, inside & 0b011011011)
    pixels_at = x + r[:, None] * IN + i[None, :]
    taps_at = weight + i[:, None] * step_in + o[None, :] * step_out
    total = tl.zeros([R, OUT], tl.float32)
    for tap in range(9):
        ok = ((inside >> tap) & 1) != 0
        pixels = tl.load(pixels_at + ((tap // 3 - 1) * WIDTH + tap % 3 - 1) * IN, mask=ok[:, None], other=0.0)
        taps = tl.load(taps_at + (8 - tap if MIRRORED else tap) * (OUT if MIRRORED else IN))
        total = tl.dot(pixels, taps, total)
    tl.store(y + r[:, None] * OUT + o[None, :], total.to(y.dtype.element_ty), mask=(r < rows)[:, None])


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _weight_parts(x, dy, parts, rows, chunk, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,  # type: ignore[no-untyped-def]
                  IN: tl.constexpr, OUT: tl.constexpr, LINES: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """dW[o, tap, i] = sum dy[., o] x[., i] over one part of the rows: one product of the gradient at three pixels side
    by side with the images at LINES lines. Numbers of columns are powers of two, so a fourth of each is for nothing."""
    part, base = tl.program_id(0), tl.program_id(1)
    a, b = tl.arange(0, 4 * OUT), tl.arange(0, LINES * IN)
    shift, line = a // OUT - 1, base + b // IN - 1
    total = tl.zeros([4 * OUT, LINES * IN], tl.float32)
    begin = part * chunk
    last = tl.minimum(rows, begin + chunk)
    for first in range(begin, last, R):
        r = first + tl.arange(0, R)
        across = (r % WIDTH)[:, None] + shift[None, :]
        down = ((r // WIDTH) % HEIGHT)[:, None] + line[None, :]
        inside = (r < last)[:, None]
        beside = inside & (across >= 0) & (across < WIDTH) & (shift < 2)[None, :]
        above = inside & (down >= 0) & (down < HEIGHT) & (line < 2)[None, :]
        gradient = tl.load(dy + r[:, None] * OUT + (a - OUT)[None, :], mask=beside, other=0.0)
        pixels = tl.load(x + (r[:, None] + line[None, :] * WIDTH) * IN + (b % IN)[None, :], mask=above, other=0.0)
        total = tl.dot(tl.trans(gradient), pixels, total)
    # dy one pixel to the right belongs to the tap on the left.
    tap = 3 * (line[None, :] + 1) + 1 - shift[:, None]
    place = parts + part * (OUT * 9 * IN) + (a % OUT)[:, None] * (9 * IN) + tap * IN + (b % IN)[None, :]
    tl.store(place, total, mask=(shift < 2)[:, None] & (line < 2)[None, :])


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add_parts(parts, out, count, size, B: tl.constexpr):  # type: ignore[no-untyped-def]
    at, rows = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, B)
    total = tl.zeros([B, B], tl.float32)
    for first in range(0, count, B):
        part = first + rows
        ok = (part < count)[:, None] & (at < size)[None, :]
        total += tl.load(parts + part[:, None] * size + at[None, :], mask=ok, other=0.0)
    tl.store(out + at, tl.sum(total, 0).to(out.dtype.element_ty), mask=at < size)


def weight_gradient(x: Tensor, dy: Tensor, out: Tensor, tile: tuple[int, int, int, int] | None = None) -> None:
    """Into ``out`` (O, I, 3, 3), channels_last."""
    n, channels, height, width = x.shape
    rows, filters = n * height * width, out.shape[0]
    block, wanted, warps, stages = tile or WEIGHT_TILES[max(channels, filters)]
    lines = 4 if channels * filters <= 32 * 32 else 1  # all at once where the product fits into registers
    chunk = block * triton.cdiv(triton.cdiv(rows, block), wanted)
    count = triton.cdiv(rows, chunk)
    parts = torch.empty(count, out.numel(), device=x.device)
    _weight_parts[(count, 1 if lines == 4 else 3)](
        x, dy, parts, rows, chunk,
        HEIGHT=height, WIDTH=width, IN=channels, OUT=filters, LINES=lines, R=block, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    _add_parts[(triton.cdiv(out.numel(), 32),)](parts, out, count, out.numel(), B=32, num_warps=4)


def usable(x: Tensor, weight: Tensor, how: tuple[object, ...]) -> bool:
    """Is this a case for the kernels here? ``how``: stride, padding, dilation, groups."""
    plain = how == ((1, 1), (1, 1), (1, 1), 1)
    narrow = weight.shape[0] in WIDTHS and weight.shape[1] in WIDTHS and weight.shape[2:] == (3, 3)
    small = x.shape[2] * x.shape[3] <= 2**10  # beyond, cuDNN is faster
    return plain and narrow and small and x.is_cuda and x.dtype == torch.bfloat16


def forward(x: Tensor, weight: Tensor) -> Tensor:
    """x (N, I, H, W), weight (O, I, 3, 3), both channels_last."""
    out, channels = weight.shape[:2]
    return _run(x, weight, channels, out, 9 * channels, mirrored=False)


def backward(dy: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the input."""
    out, channels = weight.shape[:2]
    return _run(dy, weight, out, channels, 9 * channels, mirrored=True)


def _run(x: Tensor, weight: Tensor, wide_in: int, wide_out: int, filter_step: int, mirrored: bool,
         tile: tuple[int, int, int] | None = None) -> Tensor:  # fmt: skip
    n, _, height, width = x.shape
    rows = n * height * width
    y = torch.empty(n, wide_out, height, width, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    size, warps, stages = tile or choose(rows, wide_in)
    step_in, step_out = (filter_step, 1) if mirrored else (1, filter_step)
    _convolve[(triton.cdiv(rows, size),)](
        x, weight, y, rows, step_in, step_out,
        HEIGHT=height, WIDTH=width, IN=wide_in, OUT=wide_out, R=size, MIRRORED=mirrored,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def choose(rows: int, channels: int) -> tuple[int, int, int]:
    """Rows per program, warps, stages: the best of thirty that were tried on an H200."""
    if rows < 2**14:
        return 64, 4, 3
    if channels == 32 and rows > 2**16:
        return 256, 8, 3
    return (128, 4, 3) if channels == 16 else (128, 8, 3)
