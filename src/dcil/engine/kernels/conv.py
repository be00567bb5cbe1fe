"""3x3 convolution for narrow layers: an implicit matrix product, one tap at a time (channels_last).

cuDNN's kernels are made for wide layers: at 16 to 64 channels they take three times as long as reading and writing the
images does. Stride 1 and padding 1 only; the gradient of the input is then the same product with mirrored taps.
Stacked networks have block-diagonal weights: where these are wide, only the blocks are multiplied (GROUPS).

A row is one pixel (image, y, x); its memory holds GROUPS * channels values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SUPPORTED_CHANNELS = (16, 32, 64)
MAX_PIXELS = 2**10  # per image; beyond, cuDNN is faster
#: Channels -> rows per product, parts, warps, stages of the weight gradient.
WEIGHT_GRADIENT_TILES = {16: (128, 132, 4, 3), 32: (64, 132, 4, 3), 64: (64, 32, 8, 3)}


# for each pixel r and output channel o:
#     y[r, o] = sum over the 3x3 taps t and the input channels i of  x[r + shift(t), i] * weight[o, t, i]
# MIRRORED reads tap 8 - t, and the caller exchanges the strides of i and o: the gradient of the input.
@triton.jit
def _conv3x3_kernel(x_ptr, weight_ptr, y_ptr, num_rows, stride_in, stride_out,
                    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, IN_CHANNELS: tl.constexpr, OUT_CHANNELS: tl.constexpr,
                    GROUPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, MIRRORED: tl.constexpr):  # fmt: skip
    rows, group = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), tl.program_id(1)
    col, line = rows % WIDTH, (rows // WIDTH) % HEIGHT
    in_channel, out_channel = tl.arange(0, IN_CHANNELS), tl.arange(0, OUT_CHANNELS)
    tap_bits = tl.where(rows < num_rows, 0b111111111, 0)  # one bit per tap: set if it lies inside the image
    tap_bits = tl.where(line > 0, tap_bits, tap_bits & 0b111111000)
    tap_bits = tl.where(line < HEIGHT - 1, tap_bits, tap_bits & 0b000111111)
    tap_bits = tl.where(col > 0, tap_bits, tap_bits & 0b110110110)
    tap_bits = tl.where(col < WIDTH - 1, tap_bits, tap_bits & 0b011011011)
    x_ptrs = x_ptr + rows[:, None] * (GROUPS * IN_CHANNELS) + (group * IN_CHANNELS + in_channel)[None, :]
    weight_ptrs = weight_ptr + (group * IN_CHANNELS + in_channel)[:, None] * stride_in
    weight_ptrs += (group * OUT_CHANNELS + out_channel)[None, :] * stride_out
    total = tl.zeros([BLOCK_ROWS, OUT_CHANNELS], tl.float32)
    for tap in range(9):
        mask = ((tap_bits >> tap) & 1) != 0
        shift = (tap // 3 - 1) * WIDTH + tap % 3 - 1
        pixels = tl.load(x_ptrs + shift * (GROUPS * IN_CHANNELS), mask=mask[:, None], other=0.0)
        tap_offset = (8 - tap if MIRRORED else tap) * (GROUPS * (OUT_CHANNELS if MIRRORED else IN_CHANNELS))
        total = tl.dot(pixels, tl.load(weight_ptrs + tap_offset), total)
    y_ptrs = y_ptr + rows[:, None] * (GROUPS * OUT_CHANNELS) + (group * OUT_CHANNELS + out_channel)[None, :]
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=(rows < num_rows)[:, None])


# for one part of the rows:
#     parts[part, o, t, i] = sum over the rows r of the part of  dy[r, o] * x[r + shift(t), i]
# as one product of dy at three pixels of a line (shift -1, 0, 1) with x at NUM_LINES lines. Sizes of a product are
# powers of two, so one of four shifts (and, with NUM_LINES = 4, one of four lines) is masked out.
@triton.jit
def _partial_weight_gradient_kernel(x_ptr, dy_ptr, parts_ptr, num_rows, rows_per_part,
                                    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, IN_CHANNELS: tl.constexpr,
                                    OUT_CHANNELS: tl.constexpr, GROUPS: tl.constexpr, NUM_LINES: tl.constexpr,
                                    BLOCK_ROWS: tl.constexpr):  # fmt: skip
    part, first_line, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dy_cols, x_cols = tl.arange(0, 4 * OUT_CHANNELS), tl.arange(0, NUM_LINES * IN_CHANNELS)
    shift, line = dy_cols // OUT_CHANNELS - 1, first_line + x_cols // IN_CHANNELS - 1
    total = tl.zeros([4 * OUT_CHANNELS, NUM_LINES * IN_CHANNELS], tl.float32)
    begin = part * rows_per_part
    end = tl.minimum(num_rows, begin + rows_per_part)
    for start in range(begin, end, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        dy_x = (rows % WIDTH)[:, None] + shift[None, :]
        x_y = ((rows // WIDTH) % HEIGHT)[:, None] + line[None, :]
        row_mask = (rows < end)[:, None]
        dy_mask = row_mask & (dy_x >= 0) & (dy_x < WIDTH) & (shift < 2)[None, :]
        x_mask = row_mask & (x_y >= 0) & (x_y < HEIGHT) & (line < 2)[None, :]
        dy_offsets = (rows[:, None] + shift[None, :]) * (GROUPS * OUT_CHANNELS)
        dy_offsets += (group * OUT_CHANNELS + dy_cols % OUT_CHANNELS)[None, :]
        x_offsets = (rows[:, None] + line[None, :] * WIDTH) * (GROUPS * IN_CHANNELS)
        x_offsets += (group * IN_CHANNELS + x_cols % IN_CHANNELS)[None, :]
        dy = tl.load(dy_ptr + dy_offsets, mask=dy_mask, other=0.0)
        x = tl.load(x_ptr + x_offsets, mask=x_mask, other=0.0)
        total = tl.dot(tl.trans(dy), x, total)
    # dy one pixel to the right belongs to the tap on the left.
    tap = 3 * (line[None, :] + 1) + 1 - shift[:, None]
    out_row = (part * GROUPS + group) * OUT_CHANNELS + dy_cols % OUT_CHANNELS
    parts_ptrs = parts_ptr + out_row[:, None] * (9 * IN_CHANNELS) + tap * IN_CHANNELS + (x_cols % IN_CHANNELS)[None, :]
    tl.store(parts_ptrs, total, mask=(shift < 2)[:, None] & (line < 2)[None, :])


# out[o, t, i] = sum over the parts of  parts[part, o, t, i]
@triton.jit
def _sum_parts_kernel(parts_ptr, out_ptr, num_parts, size,
                      IN_CHANNELS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr):  # fmt: skip
    offsets, block = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE), tl.arange(0, BLOCK_SIZE)
    total = tl.zeros([BLOCK_SIZE, BLOCK_SIZE], tl.float32)
    for start in range(0, num_parts, BLOCK_SIZE):
        part = start + block
        mask = (part < num_parts)[:, None] & (offsets < size)[None, :]
        total += tl.load(parts_ptr + part[:, None] * size + offsets[None, :], mask=mask, other=0.0)
    group = offsets // (size // GROUPS)
    out_ptrs = out_ptr + offsets // IN_CHANNELS * (GROUPS * IN_CHANNELS) + group * IN_CHANNELS + offsets % IN_CHANNELS
    tl.store(out_ptrs, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=offsets < size)


def supported_groups(x: Tensor, weight: Tensor, options: tuple[object, ...], blocks: int) -> int:
    """Return the number of groups these kernels compute the convolution in, 0 if they do not support it.

    ``options``: stride, padding, dilation, groups; ``blocks``: number of blocks on the diagonal of the weights.
    """
    plain = options == ((1, 1), (1, 1), (1, 1), 1) and weight.shape[2:] == (3, 3)
    if plain and x.shape[2] * x.shape[3] <= MAX_PIXELS and x.is_cuda and x.dtype == torch.bfloat16:
        for groups in sorted({1, blocks}):
            if all(size % groups == 0 and size // groups in SUPPORTED_CHANNELS for size in weight.shape[:2]):
                return groups
    return 0


def forward(x: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
    """Convolve x (N, I, H, W) with weight (O, I, 3, 3), both channels_last."""
    out_channels, in_channels = weight.shape[:2]
    return _convolve(x, weight, in_channels // groups, out_channels // groups, groups, mirrored=False)


def input_gradient(dy: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
    """Return the gradient of the input from dy (N, O, H, W)."""
    out_channels, in_channels = weight.shape[:2]
    return _convolve(dy, weight, out_channels // groups, in_channels // groups, groups, mirrored=True)


def weight_gradient(x: Tensor, dy: Tensor, out: Tensor, groups: int = 1) -> None:
    """Write the gradient of the weight into ``out`` (O, I, 3, 3), channels_last."""
    n, _, height, width = x.shape
    num_rows, out_channels, in_channels = n * height * width, out.shape[0] // groups, out.shape[1] // groups
    block_rows, max_parts, num_warps, num_stages = WEIGHT_GRADIENT_TILES[max(in_channels, out_channels)]
    num_lines = 4 if in_channels * out_channels <= 32 * 32 else 1  # all at once where the product fits into registers
    rows_per_part = block_rows * triton.cdiv(triton.cdiv(num_rows, block_rows), max_parts)
    num_parts, size = triton.cdiv(num_rows, rows_per_part), groups * out_channels * 9 * in_channels
    parts = torch.empty(num_parts, size, device=x.device)
    _partial_weight_gradient_kernel[(num_parts, 1 if num_lines == 4 else 3, groups)](
        x, dy, parts, num_rows, rows_per_part, HEIGHT=height, WIDTH=width, IN_CHANNELS=in_channels,
        OUT_CHANNELS=out_channels, GROUPS=groups, NUM_LINES=num_lines, BLOCK_ROWS=block_rows,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    _sum_parts_kernel[(triton.cdiv(size, 32),)](
        parts, out, num_parts, size, IN_CHANNELS=in_channels, GROUPS=groups, BLOCK_SIZE=32, num_warps=4
    )  # fmt: skip


def _convolve(x: Tensor, weight: Tensor, in_channels: int, out_channels: int, groups: int, mirrored: bool) -> Tensor:
    n, _, height, width = x.shape
    num_rows, shape = n * height * width, (n, out_channels * groups, height, width)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    block_rows, num_warps, num_stages = launch_options(num_rows, in_channels)
    strides = (weight.stride(0), 1) if mirrored else (1, weight.stride(0))
    _conv3x3_kernel[(triton.cdiv(num_rows, block_rows), groups)](
        x, weight, y, num_rows, *strides, HEIGHT=height, WIDTH=width, IN_CHANNELS=in_channels,
        OUT_CHANNELS=out_channels, GROUPS=groups, BLOCK_ROWS=block_rows, MIRRORED=mirrored,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return y


def launch_options(num_rows: int, channels: int) -> tuple[int, int, int]:
    """Return rows per program, warps and stages: the best of thirty combinations measured on an H200."""
    if num_rows < 2**14:
        return 64, 4, 3
    if channels == 32 and num_rows > 2**16:
        return 256, 8, 3
    return (128, 4, 3) if channels == 16 else (128, 8, 3)
