"""Batch norm, residual sum and ReLU in two kernels forward and two backward (channels_last).

A tensor is read as a matrix of rows (batch, height, width) by channels, divided into parts of rows and blocks of
channels. The first kernel of each pair writes one pair of partial sums per part; every program of the second adds them
up itself or, where there are many, reads the result of a third kernel. There is no atomic operation, so results repeat
bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcil.engine.kernels.division import Plan


@triton.jit
def _part_and_channels(CHANNELS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):
    """Return this program's part of the rows, its channels and their mask; neighbours in memory run together."""
    NUM_BLOCKS: tl.constexpr = (CHANNELS + BLOCK_CHANNELS - 1) // BLOCK_CHANNELS
    channels = tl.program_id(0) % NUM_BLOCKS * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    return tl.program_id(0) // NUM_BLOCKS, channels, channels < CHANNELS


@triton.jit
def _offsets_and_mask(start, end, channels, channel_mask, CHANNELS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Return the offsets of a block of rows from ``start``, and which of them lie before ``end``."""
    rows = (start + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    return rows[:, None] * CHANNELS + channels[None, :], (rows < end)[:, None] & channel_mask[None, :]


@triton.jit
def _store_partial_sums(parts_ptr, part, sum_a, sum_b, channels, channel_mask, CHANNELS: tl.constexpr):
    tl.store(parts_ptr + (2 * part) * CHANNELS + channels, tl.sum(sum_a, 0), mask=channel_mask)
    tl.store(parts_ptr + (2 * part + 1) * CHANNELS + channels, tl.sum(sum_b, 0), mask=channel_mask)


@triton.jit
def _load_partial_sums(parts_ptr, part, num_parts, channels, channel_mask, CHANNELS: tl.constexpr):
    mask = (part < num_parts)[:, None] & channel_mask[None, :]
    ptrs = parts_ptr + (2 * part[:, None]) * CHANNELS + channels[None, :]
    return tl.load(ptrs, mask=mask, other=0.0), tl.load(ptrs + CHANNELS, mask=mask, other=0.0)


@triton.jit
def _total_sums(parts_ptr, num_parts, channels, channel_mask, CHANNELS: tl.constexpr, BLOCK_PARTS: tl.constexpr):
    """Return both sums over all parts."""
    part = tl.arange(0, BLOCK_PARTS)
    sum_a, sum_b = _load_partial_sums(parts_ptr, part, num_parts, channels, channel_mask, CHANNELS)
    return tl.sum(sum_a, 0), tl.sum(sum_b, 0)


# parts[0] = sum over the parts of  parts[part]
@triton.jit
def _sum_parts_kernel(parts_ptr, num_parts, CHANNELS: tl.constexpr,
                      BLOCK_CHANNELS: tl.constexpr, BLOCK_PARTS: tl.constexpr):  # fmt: skip
    channels = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    channel_mask = channels < CHANNELS
    sum_a = tl.zeros([BLOCK_PARTS, BLOCK_CHANNELS], tl.float32)
    sum_b = tl.zeros([BLOCK_PARTS, BLOCK_CHANNELS], tl.float32)
    for start in range(0, num_parts, BLOCK_PARTS):
        part = start + tl.arange(0, BLOCK_PARTS)
        a, b = _load_partial_sums(parts_ptr, part, num_parts, channels, channel_mask, CHANNELS)
        sum_a += a
        sum_b += b
    _store_partial_sums(parts_ptr, 0, sum_a, sum_b, channels, channel_mask, CHANNELS)


# for each channel c, over the rows r of one part:
#     parts[part, 0, c] = sum of (x[r, c] - x[0, c]);  parts[part, 1, c] = sum of (x[r, c] - x[0, c])^2
# Any shift near the mean keeps the squares small.
@triton.jit
def _statistics_kernel(x_ptr, parts_ptr, num_rows, rows_per_part,
                       CHANNELS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):  # fmt: skip
    part, channels, channel_mask = _part_and_channels(CHANNELS, BLOCK_CHANNELS)
    shift = tl.load(x_ptr + channels, mask=channel_mask, other=0.0).to(tl.float32)
    sum_x = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], tl.float32)
    sum_squares = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], tl.float32)
    end = tl.minimum(num_rows, (part + 1) * rows_per_part)
    for start in range(part * rows_per_part, end, BLOCK_ROWS):
        offsets, mask = _offsets_and_mask(start, end, channels, channel_mask, CHANNELS, BLOCK_ROWS)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.where(mask, x - shift[None, :], 0.0)
        sum_x += x
        sum_squares += x * x
    _store_partial_sums(parts_ptr, part, sum_x, sum_squares, channels, channel_mask, CHANNELS)


# mean, variance = of the batch, from the partial sums; or the running ones if USE_RUNNING (evaluation)
# inv_std = 1 / sqrt(variance + eps)
# y = relu((x - mean) * inv_std * weight + bias + residual)
# if TRACK:  running = (1 - momentum) * running + momentum * (mean, unbiased variance)
@triton.jit
def _normalize_kernel(x_ptr, residual_ptr, y_ptr, weight_ptr, bias_ptr, mean_ptr, inv_std_ptr, running_mean_ptr,
                      running_var_ptr, parts_ptr, num_parts, num_rows, rows_per_part, eps, momentum,
                      CHANNELS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
                      BLOCK_PARTS: tl.constexpr, RELU: tl.constexpr, RESIDUAL: tl.constexpr, TRACK: tl.constexpr,
                      USE_RUNNING: tl.constexpr):  # fmt: skip
    part, channels, channel_mask = _part_and_channels(CHANNELS, BLOCK_CHANNELS)
    if USE_RUNNING:
        mean = tl.load(running_mean_ptr + channels, mask=channel_mask, other=0.0)
        variance = tl.load(running_var_ptr + channels, mask=channel_mask, other=1.0)
    else:
        sum_x, sum_squares = _total_sums(parts_ptr, num_parts, channels, channel_mask, CHANNELS, BLOCK_PARTS)
        shifted_mean = sum_x / num_rows
        variance = tl.maximum(sum_squares / num_rows - shifted_mean * shifted_mean, 0.0)
        mean = tl.load(x_ptr + channels, mask=channel_mask, other=0.0).to(tl.float32) + shifted_mean
    inv_std = 1 / tl.sqrt_rn(variance + eps)
    if part == 0 and not USE_RUNNING:
        tl.store(mean_ptr + channels, mean, mask=channel_mask)
        tl.store(inv_std_ptr + channels, inv_std, mask=channel_mask)
        if TRACK:
            old_mean = tl.load(running_mean_ptr + channels, mask=channel_mask, other=0.0)
            old_var = tl.load(running_var_ptr + channels, mask=channel_mask, other=0.0)
            unbiased = variance * (num_rows / (num_rows - 1.0))
            tl.store(running_mean_ptr + channels, old_mean * (1 - momentum) + mean * momentum, mask=channel_mask)
            tl.store(running_var_ptr + channels, old_var * (1 - momentum) + unbiased * momentum, mask=channel_mask)
    w, b = _scale_and_shift(weight_ptr, bias_ptr, mean, inv_std, channels, channel_mask)
    end = tl.minimum(num_rows, (part + 1) * rows_per_part)
    for start in range(part * rows_per_part, end, BLOCK_ROWS):
        offsets, mask = _offsets_and_mask(start, end, channels, channel_mask, CHANNELS, BLOCK_ROWS)
        y = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * w[None, :] + b[None, :]
        if RESIDUAL:
            y += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            y = tl.where(y < 0, 0.0, y)  # as in torch, NaN stays NaN
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scale_and_shift(weight_ptr, bias_ptr, mean, inv_std, channels, channel_mask):
    """Return w and b of the normalisation written as x w + b."""
    w = tl.load(weight_ptr + channels, mask=channel_mask, other=0.0).to(tl.float32) * inv_std
    b = tl.load(bias_ptr + channels, mask=channel_mask, other=0.0).to(tl.float32) - mean * w
    return w, b


@triton.jit
def _load_gradient(dy_ptr, dy2_ptr, y_ptr, offsets, mask, x, w, b,
                   RELU: tl.constexpr, RESIDUAL: tl.constexpr, TWO_GRADIENTS: tl.constexpr):  # fmt: skip
    """Return the gradient before the ReLU; without a residual the sign of the output follows from the input."""
    g = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if TWO_GRADIENTS:
        g += tl.load(dy2_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if RELU:
        if RESIDUAL:
            g = tl.where(tl.load(y_ptr + offsets, mask=mask, other=0.0) > 0, g, 0.0)
        else:
            g = tl.where(x * w[None, :] + b[None, :] > 0, g, 0.0)
    return g


# for each channel, over the rows of one part, with g the gradient before the ReLU:
#     parts[part, 0] = sum of g;  parts[part, 1] = sum of g * (x - mean) * inv_std
@triton.jit
def _gradient_sums_kernel(x_ptr, y_ptr, dy_ptr, dy2_ptr, weight_ptr, bias_ptr, mean_ptr, inv_std_ptr, parts_ptr,
                          num_rows, rows_per_part, CHANNELS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
                          BLOCK_CHANNELS: tl.constexpr, RELU: tl.constexpr, RESIDUAL: tl.constexpr,
                          TWO_GRADIENTS: tl.constexpr):  # fmt: skip
    part, channels, channel_mask = _part_and_channels(CHANNELS, BLOCK_CHANNELS)
    mean = tl.load(mean_ptr + channels, mask=channel_mask, other=0.0)
    inv_std = tl.load(inv_std_ptr + channels, mask=channel_mask, other=0.0)
    w, b = _scale_and_shift(weight_ptr, bias_ptr, mean, inv_std, channels, channel_mask)
    sum_g = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], tl.float32)
    sum_gx = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], tl.float32)
    end = tl.minimum(num_rows, (part + 1) * rows_per_part)
    for start in range(part * rows_per_part, end, BLOCK_ROWS):
        offsets, mask = _offsets_and_mask(start, end, channels, channel_mask, CHANNELS, BLOCK_ROWS)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        g = _load_gradient(dy_ptr, dy2_ptr, y_ptr, offsets, mask, x, w, b, RELU, RESIDUAL, TWO_GRADIENTS)
        sum_g += g
        sum_gx += g * (x - mean[None, :]) * inv_std[None, :]
    _store_partial_sums(parts_ptr, part, sum_g, sum_gx, channels, channel_mask, CHANNELS)


# dbias = sum of g;  dweight = sum of g * (x - mean) * inv_std        (from the partial sums)
# dresidual = g
# dx = weight * inv_std * (g - dbias / num_rows - (x - mean) * inv_std * dweight / num_rows)
@triton.jit
def _input_gradient_kernel(x_ptr, y_ptr, dy_ptr, dy2_ptr, dx_ptr, dresidual_ptr, weight_ptr, bias_ptr, mean_ptr,
                           inv_std_ptr, dweight_ptr, dbias_ptr, parts_ptr, num_parts, num_rows, rows_per_part,
                           CHANNELS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
                           BLOCK_PARTS: tl.constexpr, RELU: tl.constexpr, RESIDUAL: tl.constexpr,
                           TWO_GRADIENTS: tl.constexpr):  # fmt: skip
    part, channels, channel_mask = _part_and_channels(CHANNELS, BLOCK_CHANNELS)
    sum_g, sum_gx = _total_sums(parts_ptr, num_parts, channels, channel_mask, CHANNELS, BLOCK_PARTS)
    if part == 0:
        tl.store(dbias_ptr + channels, sum_g, mask=channel_mask)
        tl.store(dweight_ptr + channels, sum_gx, mask=channel_mask)
    mean = tl.load(mean_ptr + channels, mask=channel_mask, other=0.0)
    inv_std = tl.load(inv_std_ptr + channels, mask=channel_mask, other=0.0)
    w, b = _scale_and_shift(weight_ptr, bias_ptr, mean, inv_std, channels, channel_mask)
    mean_g, mean_gx = sum_g / num_rows, sum_gx / num_rows
    end = tl.minimum(num_rows, (part + 1) * rows_per_part)
    for start in range(part * rows_per_part, end, BLOCK_ROWS):
        offsets, mask = _offsets_and_mask(start, end, channels, channel_mask, CHANNELS, BLOCK_ROWS)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        g = _load_gradient(dy_ptr, dy2_ptr, y_ptr, offsets, mask, x, w, b, RELU, RESIDUAL, TWO_GRADIENTS)
        if RESIDUAL:
            tl.store(dresidual_ptr + offsets, g.to(dresidual_ptr.dtype.element_ty), mask=mask)
        g = w[None, :] * (g - mean_g[None, :] - (x - mean[None, :]) * inv_std[None, :] * mean_gx[None, :])
        tl.store(dx_ptr + offsets, g.to(dx_ptr.dtype.element_ty), mask=mask)


def sum_parts(parts: Tensor, plan: Plan) -> int:
    """Add up the parts of a large matrix in place; return how many are left for the next kernel to add."""
    if not plan.large:
        return len(parts)
    grid = (triton.cdiv(plan.channels, 16),)
    _sum_parts_kernel[grid](parts, len(parts), plan.channels, BLOCK_CHANNELS=16, BLOCK_PARTS=128, num_warps=4)
    return 1


def forward(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, relu: bool,
            running: tuple[Tensor, Tensor] | None, momentum: float) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (output, mean, 1 / standard deviation) of the batch; updates ``running`` (mean, variance) if given."""
    plan = Plan.of(x)
    sums, writes = plan.divide_sums(), plan.divide_writes(8192)
    parts = torch.empty(sums.num_parts, 2, plan.channels, device=x.device)
    mean, inv_std = torch.empty(2, plan.channels, device=x.device)
    y = torch.empty_like(x)
    _statistics_kernel[sums.grid](x, parts, plan.num_rows, sums.rows_per_part, **sums.blocks)
    num_parts = sum_parts(parts, plan)
    _normalize_kernel[writes.grid](
        x, x if residual is None else residual, y, weight, bias, mean, inv_std, *(running or (mean, mean)), parts,
        num_parts, plan.num_rows, writes.rows_per_part, eps, momentum, BLOCK_PARTS=triton.next_power_of_2(num_parts),
        RELU=relu, RESIDUAL=residual is not None, TRACK=running is not None, USE_RUNNING=False, **writes.blocks,
    )  # fmt: skip
    return y, mean, inv_std


def evaluate(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, relu: bool,
             running: tuple[Tensor, Tensor]) -> Tensor:  # fmt: skip
    """Return the output with the running statistics."""
    plan = Plan.of(x)
    writes = plan.divide_writes(8192)
    y = torch.empty_like(x)
    _normalize_kernel[writes.grid](
        x, x if residual is None else residual, y, weight, bias, *running, *running, weight,
        1, plan.num_rows, writes.rows_per_part, eps, 0.0, BLOCK_PARTS=1,
        RELU=relu, RESIDUAL=residual is not None, TRACK=False, USE_RUNNING=True, **writes.blocks,
    )  # fmt: skip
    return y


def backward(x: Tensor, y: Tensor, grads: list[Tensor], residual: bool, weight: Tensor, bias: Tensor, mean: Tensor,
             inv_std: Tensor, relu: bool, dweight: Tensor, dbias: Tensor) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of input and residual; writes those of weight and bias into ``dweight`` and ``dbias``."""
    plan = Plan.of(x)
    sums, writes = plan.divide_sums(), plan.divide_writes(4096 if x.numel() >= 2**22 else 8192)
    parts = torch.empty(sums.num_parts, 2, plan.channels, device=x.device)
    options = {"RELU": relu, "RESIDUAL": residual, "TWO_GRADIENTS": len(grads) > 1}
    dx = torch.empty_like(x)
    dresidual = torch.empty_like(x) if residual else None
    _gradient_sums_kernel[sums.grid](
        x, y, grads[0], grads[-1], weight, bias, mean, inv_std, parts,
        plan.num_rows, sums.rows_per_part, **options, **sums.blocks,
    )  # fmt: skip
    num_parts = sum_parts(parts, plan)
    _input_gradient_kernel[writes.grid](
        x, y, grads[0], grads[-1], dx, dx if dresidual is None else dresidual, weight, bias, mean, inv_std, dweight,
        dbias, parts, num_parts, plan.num_rows, writes.rows_per_part,
        BLOCK_PARTS=triton.next_power_of_2(num_parts), **options, **writes.blocks,
    )  # fmt: skip
    return dx, dresidual
