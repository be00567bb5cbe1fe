"""Max pooling (Triton, channels innermost): which pixel of its window won is kept in one byte instead of eight, and
backward every pixel asks the few windows that it lies in, so nothing has to be zeroed or added atomically."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

ELEMENTS = 2048  # of a program


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _pool(x, y, winner, rows, HIGH: tl.constexpr, WIDE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,  # type: ignore[no-untyped-def]
          CHANNELS: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
          R: tl.constexpr, C: tl.constexpr):  # fmt: skip
    r = tl.program_id(0) * R + tl.arange(0, R)  # pixels are counted in 32 bits, their values in 64
    c = tl.program_id(1) * C + tl.arange(0, C)
    top, left = (r // WIDTH) % HEIGHT * STRIDE - PAD, r % WIDTH * STRIDE - PAD
    image = r // (HEIGHT * WIDTH) * (HIGH * WIDE)
    ok = (r < rows)[:, None] & (c < CHANNELS)[None, :]
    best = tl.full([R, C], float("-inf"), tl.float32)
    won = tl.zeros([R, C], tl.int32)
    for tap in tl.static_range(K * K):
        down, across = top + tap // K, left + tap % K
        inside = (down >= 0) & (down < HIGH) & (across >= 0) & (across < WIDE)
        at = (image + down * WIDE + across).to(tl.int64)[:, None] * CHANNELS + c[None, :]
        v = tl.load(x + at, mask=ok & inside[:, None], other=float("-inf")).to(tl.float32)
        better = (v > best) | (v != v)  # as torch: what is not a number wins
        best = tl.where(better, v, best)
        won = tl.where(better, tap, won)
    at = r.to(tl.int64)[:, None] * CHANNELS + c[None, :]
    tl.store(y + at, best.to(y.dtype.element_ty), mask=ok)
    tl.store(winner + at, won.to(tl.uint8), mask=ok)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _give_back(dy, winner, dx, rows, HIGH: tl.constexpr, WIDE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,  # type: ignore[no-untyped-def]
               CHANNELS: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
               R: tl.constexpr, C: tl.constexpr):  # fmt: skip
    r = tl.program_id(0) * R + tl.arange(0, R)  # pixels are counted in 32 bits, their values in 64
    c = tl.program_id(1) * C + tl.arange(0, C)
    down, across = (r // WIDE) % HIGH + PAD, r % WIDE + PAD
    image = r // (HIGH * WIDE) * (HEIGHT * WIDTH)
    ok = (r < rows)[:, None] & (c < CHANNELS)[None, :]
    total = tl.zeros([R, C], tl.float32)
    EACH: tl.constexpr = (K + STRIDE - 1) // STRIDE  # windows that a pixel can lie in, each way
    for window in tl.static_range(EACH * EACH):
        y, x = down // STRIDE - window // EACH, across // STRIDE - window % EACH
        in_y, in_x = down - y * STRIDE, across - x * STRIDE
        inside = (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH) & (in_y < K) & (in_x < K)
        at = (image + y * WIDTH + x).to(tl.int64)[:, None] * CHANNELS + c[None, :]
        here = ok & inside[:, None]
        won = tl.load(winner + at, mask=here, other=255).to(tl.int32)
        g = tl.load(dy + at, mask=here, other=0.0).to(tl.float32)
        total += tl.where(won == (in_y * K + in_x).to(tl.int32)[:, None], g, 0.0)
    tl.store(dx + r.to(tl.int64)[:, None] * CHANNELS + c[None, :], total.to(dx.dtype.element_ty), mask=ok)


def forward(x: Tensor, kernel: int, stride: int, pad: int) -> tuple[Tensor, Tensor]:
    """(maxima, number of the pixel in its window that each comes from); x is channels_last."""
    n, channels, high, wide = x.shape
    height, width = ((side + 2 * pad - kernel) // stride + 1 for side in (high, wide))
    shape = (n, channels, height, width)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    winner = torch.empty(shape, dtype=torch.uint8, device=x.device, memory_format=torch.channels_last)
    grid, blocks = divide(n * height * width, channels)
    _pool[grid](x, y, winner, n * height * width, high, wide, height, width, channels, kernel, stride, pad, **blocks)
    return y, winner


def backward(dy: Tensor, winner: Tensor, size: tuple[int, int], kernel: int, stride: int, pad: int) -> Tensor:
    """The gradient of the images of height and width ``size``."""
    n, channels, height, width = dy.shape
    high, wide = size
    dx = torch.empty(n, channels, high, wide, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
    grid, blocks = divide(n * high * wide, channels)
    _give_back[grid](
        dy, winner, dx, n * high * wide, high, wide, height, width, channels, kernel, stride, pad, **blocks
    )
    return dx


def divide(rows: int, channels: int) -> tuple[tuple[int, int], dict[str, int]]:
    c = min(64, int(triton.next_power_of_2(channels)))
    r = ELEMENTS // c
    return (int(triton.cdiv(rows, r)), int(triton.cdiv(channels, c))), {"R": r, "C": c, "num_warps": 4}
