"""3x3 convolution of narrow images (Triton, channels innermost): an implicit matrix product, tap by tap.

cuDNN's kernels are made for wide layers: at 16 to 64 channels they take three times as long as reading and writing
the images does. Stride 1 and padding 1 only; then the gradient of the input is the same product with mirrored taps.
Stacked networks have block-diagonal weights: where they are wide, only the blocks are multiplied (GROUPS).
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
def _convolve(x, weight, y, rows, step_in, step_out,  # type: ignore[no-untyped-def]
              HEIGHT: tl.constexpr, WIDTH: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, GROUPS: tl.constexpr,
              R: tl.constexpr, MIRRORED: tl.constexpr):  # fmt: skip
    r, group = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1)
    across, down = r % WIDTH, (r // WIDTH) % HEIGHT
    i, o = tl.arange(0, IN), tl.arange(0, OUT)
    inside = tl.where(r < rows, 0b111111111, 0)  # a bit for every tap: does it lie inside of the image?
    inside = tl.where(down > 0, inside, inside & 0b111111000)
    inside = tl.where(down < HEIGHT - 1, inside, inside & 0b000111111)
    inside = tl.where(across > 0, inside, inside & 0b110110110)
    inside = tl.where(across < WIDTH - 1, inside, inside & 0b011011011)
    pixels_at = x + r[:, None] * (GROUPS * IN) + (group * IN + i)[None, :]
    taps_at = weight + (group * IN + i)[:, None] * step_in + (group * OUT + o)[None, :] * step_out
    total = tl.zeros([R, OUT], tl.float32)
    for tap in range(9):
        ok = ((inside >> tap) & 1) != 0
        shift = (tap // 3 - 1) * WIDTH + tap % 3 - 1
        pixels = tl.load(pixels_at + shift * (GROUPS * IN), mask=ok[:, None], other=0.0)
        taps = tl.load(taps_at + (8 - tap if MIRRORED else tap) * (GROUPS * (OUT if MIRRORED else IN)))
        total = tl.dot(pixels, taps, total)
    place = y + r[:, None] * (GROUPS * OUT) + (group * OUT + o)[None, :]
    tl.store(place, total.to(y.dtype.element_ty), mask=(r < rows)[:, None])


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _weight_parts(x, dy, parts, rows, chunk,  # type: ignore[no-untyped-def]
                  HEIGHT: tl.constexpr, WIDTH: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, GROUPS: tl.constexpr,
                  LINES: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """dW[o, tap, i] = sum dy[., o] x[., i] over one part of the rows: one product of the gradient at three pixels side
    by side with the images at LINES lines. Numbers of columns are powers of two, so a fourth of each is for nothing."""
    part, base, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
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
        gradient_at = (r[:, None] + shift[None, :]) * (GROUPS * OUT) + (group * OUT + a % OUT)[None, :]
        pixels_at = (r[:, None] + line[None, :] * WIDTH) * (GROUPS * IN) + (group * IN + b % IN)[None, :]
        gradient = tl.load(dy + gradient_at, mask=beside, other=0.0)
        pixels = tl.load(x + pixels_at, mask=above, other=0.0)
        total = tl.dot(tl.trans(gradient), pixels, total)
    # dy one pixel to the right belongs to the tap on the left.
    tap = 3 * (line[None, :] + 1) + 1 - shift[:, None]
    row = (part * GROUPS + group) * OUT + a % OUT
    place = parts + row[:, None] * (9 * IN) + tap * IN + (b % IN)[None, :]
    tl.store(place, total, mask=(shift < 2)[:, None] & (line < 2)[None, :])


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add_parts(parts, out, count, size, IN: tl.constexpr, GROUPS: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    at, rows = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, B)
    total = tl.zeros([B, B], tl.float32)
    for first in range(0, count, B):
        part = first + rows
        ok = (part < count)[:, None] & (at < size)[None, :]
        total += tl.load(parts + part[:, None] * size + at[None, :], mask=ok, other=0.0)
    group = at // (size // GROUPS)
    place = out + at // IN * (GROUPS * IN) + group * IN + at % IN
    tl.store(place, tl.sum(total, 0).to(out.dtype.element_ty), mask=at < size)


def weight_gradient(x: Tensor, dy: Tensor, out: Tensor, groups: int = 1) -> None:
    """Into ``out`` (O, I, 3, 3), channels_last."""
    n, _, height, width = x.shape
    rows, filters, channels = n * height * width, out.shape[0] // groups, out.shape[1] // groups
    block, wanted, warps, stages = WEIGHT_TILES[max(channels, filters)]
    lines = 4 if channels * filters <= 32 * 32 else 1  # all at once where the product fits into registers
    chunk = block * triton.cdiv(triton.cdiv(rows, block), wanted)
    count, size = triton.cdiv(rows, chunk), groups * filters * 9 * channels
    parts = torch.empty(count, size, device=x.device)
    _weight_parts[(count, 1 if lines == 4 else 3, groups)](
        x, dy, parts, rows, chunk, HEIGHT=height, WIDTH=width, IN=channels, OUT=filters, GROUPS=groups, LINES=lines,
        R=block, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    _add_parts[(triton.cdiv(size, 32),)](parts, out, count, size, IN=channels, GROUPS=groups, B=32, num_warps=4)


def usable(x: Tensor, weight: Tensor, how: tuple[object, ...], blocks: int) -> int:
    """In how many groups the kernels here take this case, 0 if not at all.

    ``how``: stride, padding, dilation, groups; ``blocks``: on the diagonal of the weights.
    """
    plain = how == ((1, 1), (1, 1), (1, 1), 1) and weight.shape[2:] == (3, 3)
    small = x.shape[2] * x.shape[3] <= 2**10  # beyond, cuDNN is faster
    if plain and small and x.is_cuda and x.dtype == torch.bfloat16:
        for groups in sorted({1, blocks}):
            if all(side % groups == 0 and side // groups in WIDTHS for side in weight.shape[:2]):
                return groups
    return 0


def forward(x: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
    """x (N, I, H, W), weight (O, I, 3, 3), both channels_last."""
    out, channels = weight.shape[:2]
    return _run(x, weight, channels // groups, out // groups, groups, mirrored=False)


def backward(dy: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
    """The gradient of the input."""
    out, channels = weight.shape[:2]
    return _run(dy, weight, out // groups, channels // groups, groups, mirrored=True)


def _run(x: Tensor, weight: Tensor, wide_in: int, wide_out: int, groups: int, mirrored: bool) -> Tensor:
    n, _, height, width = x.shape
    rows, shape = n * height * width, (n, wide_out * groups, height, width)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    size, warps, stages = choose(rows, wide_in)
    steps = (weight.stride(0), 1) if mirrored else (1, weight.stride(0))
    _convolve[(triton.cdiv(rows, size), groups)](
        x, weight, y, rows, *steps,
        HEIGHT=height, WIDTH=width, IN=wide_in, OUT=wide_out, GROUPS=groups, R=size, MIRRORED=mirrored,
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
