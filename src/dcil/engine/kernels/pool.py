"""Max pooling (channels_last) that stores the index of each window's maximum in one byte instead of eight.

In the backward pass every input pixel reads the few windows that contain it, so nothing is zeroed or added atomically.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_ELEMENTS = 2048


@triton.jit
def _block(num_rows, CHANNELS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):
    """Return this program's pixels, channels and mask; pixels are counted in 32 bits, their values in 64."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    channels = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    return rows, channels, (rows < num_rows)[:, None] & (channels < CHANNELS)[None, :]


# for each output pixel and channel:
#     y = max over the window of x;  argmax = the tap (0 ... KERNEL^2 - 1) of the first maximum
@triton.jit
def _max_pool_kernel(x_ptr, y_ptr, argmax_ptr, num_rows, IN_HEIGHT: tl.constexpr, IN_WIDTH: tl.constexpr,
                     OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
                     KERNEL: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
                     BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):  # fmt: skip
    rows, channels, mask = _block(num_rows, CHANNELS, BLOCK_ROWS, BLOCK_CHANNELS)
    top, left = (rows // OUT_WIDTH) % OUT_HEIGHT * STRIDE - PAD, rows % OUT_WIDTH * STRIDE - PAD
    image = rows // (OUT_HEIGHT * OUT_WIDTH) * (IN_HEIGHT * IN_WIDTH)
    best = tl.full([BLOCK_ROWS, BLOCK_CHANNELS], float("-inf"), tl.float32)
    argmax = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], tl.int32)
    for tap in tl.static_range(KERNEL * KERNEL):
        line, col = top + tap // KERNEL, left + tap % KERNEL
        inside = (line >= 0) & (line < IN_HEIGHT) & (col >= 0) & (col < IN_WIDTH)
        offsets = (image + line * IN_WIDTH + col).to(tl.int64)[:, None] * CHANNELS + channels[None, :]
        x = tl.load(x_ptr + offsets, mask=mask & inside[:, None], other=float("-inf")).to(tl.float32)
        better = (x > best) | (x != x)  # as in torch, NaN is the maximum
        best = tl.where(better, x, best)
        argmax = tl.where(better, tap, argmax)
    offsets = rows.to(tl.int64)[:, None] * CHANNELS + channels[None, :]
    tl.store(y_ptr + offsets, best.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(argmax_ptr + offsets, argmax.to(tl.uint8), mask=mask)


# for each input pixel and channel:
#     dx = sum of dy over the windows that contain the pixel and whose argmax is this pixel
@triton.jit
def _max_pool_gradient_kernel(dy_ptr, argmax_ptr, dx_ptr, num_rows, IN_HEIGHT: tl.constexpr, IN_WIDTH: tl.constexpr,
                              OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
                              KERNEL: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
                              BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):  # fmt: skip
    rows, channels, mask = _block(num_rows, CHANNELS, BLOCK_ROWS, BLOCK_CHANNELS)
    line, col = (rows // IN_WIDTH) % IN_HEIGHT + PAD, rows % IN_WIDTH + PAD
    image = rows // (IN_HEIGHT * IN_WIDTH) * (OUT_HEIGHT * OUT_WIDTH)
    total = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], tl.float32)
    WINDOWS: tl.constexpr = (KERNEL + STRIDE - 1) // STRIDE  # that can contain a pixel, in each direction
    for window in tl.static_range(WINDOWS * WINDOWS):
        y, x = line // STRIDE - window // WINDOWS, col // STRIDE - window % WINDOWS
        tap_y, tap_x = line - y * STRIDE, col - x * STRIDE
        inside = (y >= 0) & (y < OUT_HEIGHT) & (x >= 0) & (x < OUT_WIDTH) & (tap_y < KERNEL) & (tap_x < KERNEL)
        offsets = (image + y * OUT_WIDTH + x).to(tl.int64)[:, None] * CHANNELS + channels[None, :]
        window_mask = mask & inside[:, None]
        argmax = tl.load(argmax_ptr + offsets, mask=window_mask, other=255).to(tl.int32)
        dy = tl.load(dy_ptr + offsets, mask=window_mask, other=0.0).to(tl.float32)
        total += tl.where(argmax == (tap_y * KERNEL + tap_x).to(tl.int32)[:, None], dy, 0.0)
    offsets = rows.to(tl.int64)[:, None] * CHANNELS + channels[None, :]
    tl.store(dx_ptr + offsets, total.to(dx_ptr.dtype.element_ty), mask=mask)


def forward(x: Tensor, kernel: int, stride: int, pad: int) -> tuple[Tensor, Tensor]:
    """Return the maxima and, for each, the tap of its window that it comes from; x is channels_last."""
    n, channels, in_height, in_width = x.shape
    height, width = ((size + 2 * pad - kernel) // stride + 1 for size in (in_height, in_width))
    shape, num_rows = (n, channels, height, width), n * height * width
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    argmax = torch.empty(shape, dtype=torch.uint8, device=x.device, memory_format=torch.channels_last)
    grid, blocks = launch_options(num_rows, channels)
    _max_pool_kernel[grid](
        x, y, argmax, num_rows, in_height, in_width, height, width, channels, kernel, stride, pad, **blocks
    )  # fmt: skip
    return y, argmax


def backward(dy: Tensor, argmax: Tensor, size: tuple[int, int], kernel: int, stride: int, pad: int) -> Tensor:
    """Return the gradient of the images, whose height and width are ``size``."""
    n, channels, height, width = dy.shape
    in_height, in_width = size
    shape, num_rows = (n, channels, in_height, in_width), n * in_height * in_width
    dx = torch.empty(shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
    grid, blocks = launch_options(num_rows, channels)
    _max_pool_gradient_kernel[grid](
        dy, argmax, dx, num_rows, in_height, in_width, height, width, channels, kernel, stride, pad, **blocks
    )  # fmt: skip
    return dx


def launch_options(num_rows: int, channels: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid and the block sizes."""
    block_channels = min(64, int(triton.next_power_of_2(channels)))
    block_rows = BLOCK_ELEMENTS // block_channels
    grid = int(triton.cdiv(num_rows, block_rows)), int(triton.cdiv(channels, block_channels))
    return grid, {"BLOCK_ROWS": block_rows, "BLOCK_CHANNELS": block_channels, "num_warps": 4}
