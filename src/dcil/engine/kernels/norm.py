"""Batch norm, residual sum and ReLU in two kernels forward and two backward (Triton, channels innermost).

A tensor is read as a matrix of rows (batch, height, width) by channels. The first kernel of each pair leaves partial
sums; the programs of the second one add them up themselves, or, where they are many, find it done by a third. There is
no atomic operation, so results repeat bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

PROCESSORS = 132  # of an H100 or H200; elsewhere only the number of parts is less well chosen
LARGE = 2**24  # elements: what fits into the second-level cache


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _place(channels: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """The stretch of rows and the channels of this program; those beside each other in memory run at the same time."""
    COLUMNS: tl.constexpr = (channels + C - 1) // C
    return tl.program_id(0) // COLUMNS, tl.program_id(0) % COLUMNS * C + tl.arange(0, C)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _statistics(x, parts, rows, chunk, channels: tl.constexpr, R: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    part, c = _place(channels, C)
    inside = c < channels
    shift = tl.load(x + c, mask=inside, other=0.0).to(tl.float32)  # any value near the mean keeps the squares small
    one = tl.zeros([R, C], tl.float32)
    two = tl.zeros([R, C], tl.float32)
    last = tl.minimum(rows, (part + 1) * chunk)
    for first in range(part * chunk, last, R):
        r = (first + tl.arange(0, R)).to(tl.int64)
        ok = (r < last)[:, None] & inside[None, :]
        v = tl.load(x + r[:, None] * channels + c[None, :], mask=ok, other=0.0).to(tl.float32)
        v = tl.where(ok, v - shift[None, :], 0.0)
        one += v
        two += v * v
    tl.store(parts + (2 * part) * channels + c, tl.sum(one, 0), mask=inside)
    tl.store(parts + (2 * part + 1) * channels + c, tl.sum(two, 0), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _total(parts, count, c, inside, channels: tl.constexpr, P: tl.constexpr):  # type: ignore[no-untyped-def]
    p = tl.arange(0, P)
    ok = (p < count)[:, None] & inside[None, :]
    at = parts + (2 * p[:, None]) * channels + c[None, :]
    return tl.sum(tl.load(at, mask=ok, other=0.0), 0), tl.sum(tl.load(at + channels, mask=ok, other=0.0), 0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _fold(parts, count, channels: tl.constexpr, C: tl.constexpr, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of all parts in place of the first."""
    c = tl.program_id(0) * C + tl.arange(0, C)
    one = tl.zeros([P, C], tl.float32)
    two = tl.zeros([P, C], tl.float32)
    for first in range(0, count, P):
        p = first + tl.arange(0, P)
        ok = (p < count)[:, None] & (c < channels)[None, :]
        at = parts + (2 * p[:, None]) * channels + c[None, :]
        one += tl.load(at, mask=ok, other=0.0)
        two += tl.load(at + channels, mask=ok, other=0.0)
    tl.store(parts + c, tl.sum(one, 0), mask=c < channels)
    tl.store(parts + channels + c, tl.sum(two, 0), mask=c < channels)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _normalize(x, residual, y, weight, bias, mean_out, scale_out, running_mean, running_var, parts,  # type: ignore[no-untyped-def]
               count, rows, chunk, eps, momentum,
               channels: tl.constexpr, R: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
               RELU: tl.constexpr, RESIDUAL: tl.constexpr, TRACK: tl.constexpr, KNOWN: tl.constexpr):  # fmt: skip
    """KNOWN: in evaluation the statistics are the running ones."""
    part, c = _place(channels, C)
    inside = c < channels
    if KNOWN:
        mean = tl.load(running_mean + c, mask=inside, other=0.0)
        variance = tl.load(running_var + c, mask=inside, other=1.0)
    else:
        one, two = _total(parts, count, c, inside, channels, P)
        off = one / rows
        variance = tl.maximum(two / rows - off * off, 0.0)
        mean = tl.load(x + c, mask=inside, other=0.0).to(tl.float32) + off
    scale = 1 / tl.sqrt_rn(variance + eps)
    if part == 0 and not KNOWN:
        tl.store(mean_out + c, mean, mask=inside)
        tl.store(scale_out + c, scale, mask=inside)
        if TRACK:
            old_mean = tl.load(running_mean + c, mask=inside, other=0.0)
            old_var = tl.load(running_var + c, mask=inside, other=0.0)
            unbiased = variance * (rows / (rows - 1.0))
            tl.store(running_mean + c, old_mean * (1 - momentum) + mean * momentum, mask=inside)
            tl.store(running_var + c, old_var * (1 - momentum) + unbiased * momentum, mask=inside)
    w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32) * scale
    b = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32) - mean * w
    last = tl.minimum(rows, (part + 1) * chunk)
    for first in range(part * chunk, last, R):
        r = (first + tl.arange(0, R)).to(tl.int64)
        ok = (r < last)[:, None] & inside[None, :]
        at = r[:, None] * channels + c[None, :]
        v = tl.load(x + at, mask=ok, other=0.0).to(tl.float32) * w[None, :] + b[None, :]
        if RESIDUAL:
            v += tl.load(residual + at, mask=ok, other=0.0).to(tl.float32)
        if RELU:
            v = tl.where(v < 0, 0.0, v)  # as torch: what is not a number stays so
        tl.store(y + at, v.to(y.dtype.element_ty), mask=ok)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _normalization(weight, bias, mean_in, scale_in, c, inside):  # type: ignore[no-untyped-def]
    """Mean and 1 / standard deviation, and the forward pass as w v + b."""
    mean = tl.load(mean_in + c, mask=inside, other=0.0)
    scale = tl.load(scale_in + c, mask=inside, other=0.0)
    w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32) * scale
    b = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32) - mean * w
    return mean, scale, w, b


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _arriving(dy, dy2, y, at, ok, v, w, b, RELU: tl.constexpr, RESIDUAL: tl.constexpr, TWO: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradient behind the ReLU; without a residual the sign of the output follows from the input."""
    g = tl.load(dy + at, mask=ok, other=0.0).to(tl.float32)
    if TWO:
        g += tl.load(dy2 + at, mask=ok, other=0.0).to(tl.float32)
    if RELU:
        if RESIDUAL:
            g = tl.where(tl.load(y + at, mask=ok, other=0.0) > 0, g, 0.0)
        else:
            g = tl.where(v * w[None, :] + b[None, :] > 0, g, 0.0)
    return g


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _reduce_gradient(x, y, dy, dy2, weight, bias, mean_in, scale_in, parts, rows, chunk,  # type: ignore[no-untyped-def]
                     channels: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
                     RELU: tl.constexpr, RESIDUAL: tl.constexpr, TWO: tl.constexpr):  # fmt: skip
    part, c = _place(channels, C)
    inside = c < channels
    mean, scale, w, b = _normalization(weight, bias, mean_in, scale_in, c, inside)
    one = tl.zeros([R, C], tl.float32)
    two = tl.zeros([R, C], tl.float32)
    last = tl.minimum(rows, (part + 1) * chunk)
    for first in range(part * chunk, last, R):
        r = (first + tl.arange(0, R)).to(tl.int64)
        ok = (r < last)[:, None] & inside[None, :]
        at = r[:, None] * channels + c[None, :]
        v = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
        g = _arriving(dy, dy2, y, at, ok, v, w, b, RELU, RESIDUAL, TWO)
        one += g
        two += g * (v - mean[None, :]) * scale[None, :]
    tl.store(parts + (2 * part) * channels + c, tl.sum(one, 0), mask=inside)
    tl.store(parts + (2 * part + 1) * channels + c, tl.sum(two, 0), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _pass_gradient(x, y, dy, dy2, dx, dres, weight, bias, mean_in, scale_in, dweight, dbias, parts,  # type: ignore[no-untyped-def]
                   count, rows, chunk, channels: tl.constexpr, R: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
                   RELU: tl.constexpr, RESIDUAL: tl.constexpr, TWO: tl.constexpr):  # fmt: skip
    part, c = _place(channels, C)
    inside = c < channels
    one, two = _total(parts, count, c, inside, channels, P)
    if part == 0:
        tl.store(dbias + c, one, mask=inside)
        tl.store(dweight + c, two, mask=inside)
    mean, scale, w, b = _normalization(weight, bias, mean_in, scale_in, c, inside)
    one, two = one / rows, two / rows
    last = tl.minimum(rows, (part + 1) * chunk)
    for first in range(part * chunk, last, R):
        r = (first + tl.arange(0, R)).to(tl.int64)
        ok = (r < last)[:, None] & inside[None, :]
        at = r[:, None] * channels + c[None, :]
        v = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
        g = _arriving(dy, dy2, y, at, ok, v, w, b, RELU, RESIDUAL, TWO)
        if RESIDUAL:
            tl.store(dres + at, g.to(dres.dtype.element_ty), mask=ok)
        g = w[None, :] * (g - one[None, :] - (v - mean[None, :]) * scale[None, :] * two[None, :])
        tl.store(dx + at, g.to(dx.dtype.element_ty), mask=ok)


class Division(NamedTuple):
    """Block sizes, programs side by side, stretches of rows below each other, rows in each of these."""

    blocks: dict[str, Any]
    columns: int
    parts: int
    stretch: int

    @property
    def grid(self) -> tuple[int]:
        return (self.columns * self.parts,)


@dataclass(frozen=True)
class Plan:
    """How the kernels divide a matrix among programs; the numbers are the best of those tried on an H200."""

    rows: int
    channels: int

    @classmethod
    def of(cls, x: Tensor) -> Plan:
        return cls(x.numel() // x.shape[1], x.shape[1])

    @property
    def large(self) -> bool:
        """Beyond the cache what counts is to keep the memory busy."""
        return self.rows * self.channels > LARGE

    def divide(self, elements: int, programs: int, width: int = 64) -> Division:
        width = min(width, int(triton.next_power_of_2(self.channels)))
        columns, block = int(triton.cdiv(self.channels, width)), elements // width
        most = triton.cdiv(self.rows, block)
        stretch = block * triton.cdiv(most, max(1, min(most, triton.cdiv(programs, columns))))
        blocks = {"channels": self.channels, "R": block, "C": width, "num_warps": 4}
        return Division(blocks, columns, int(triton.cdiv(self.rows, stretch)), stretch)

    def reduce(self) -> Division:
        """Few parts, since every program of the second kernel adds them all up, unless that is done for them."""
        parts = 128 if self.rows >= 2**16 else 64
        columns = triton.cdiv(self.channels, 64)
        return self.divide(8192, max(parts * columns, 4 * PROCESSORS if self.large else 0))

    def write(self, elements: int) -> Division:
        if self.large:
            return self.divide(4096, self.rows * self.channels, width=128)  # a block for each program
        return self.divide(elements, 4 * PROCESSORS)

    def fold(self, parts: Tensor) -> int:
        """How many parts are left to add up."""
        if not self.large:
            return len(parts)
        _fold[(triton.cdiv(self.channels, 16),)](parts, len(parts), self.channels, C=16, P=128, num_warps=4)
        return 1


def forward(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, relu: bool,
            running: tuple[Tensor, Tensor] | None, momentum: float) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(output, mean, 1 / standard deviation); moves the running statistics if there are any."""
    plan = Plan.of(x)
    reading = plan.reduce()
    parts = torch.empty(reading.parts, 2, plan.channels, device=x.device)
    mean, scale = torch.empty(2, plan.channels, device=x.device)
    y = torch.empty_like(x)
    _statistics[reading.grid](x, parts, plan.rows, reading.stretch, **reading.blocks)
    count = plan.fold(parts)
    track = running or (mean, mean)
    writing = plan.write(8192)
    _normalize[writing.grid](
        x, x if residual is None else residual, y, weight, bias, mean, scale, *track, parts,
        count, plan.rows, writing.stretch, eps, momentum, P=triton.next_power_of_2(count),
        RELU=relu, RESIDUAL=residual is not None, TRACK=running is not None, KNOWN=False, **writing.blocks,
    )  # fmt: skip
    return y, mean, scale


def evaluate(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, relu: bool,
             running: tuple[Tensor, Tensor]) -> Tensor:  # fmt: skip
    """The output by the running statistics."""
    plan = Plan.of(x)
    y = torch.empty_like(x)
    writing = plan.write(8192)
    _normalize[writing.grid](
        x, x if residual is None else residual, y, weight, bias, *running, *running, weight,
        1, plan.rows, writing.stretch, eps, 0.0, P=1,
        RELU=relu, RESIDUAL=residual is not None, TRACK=False, KNOWN=True, **writing.blocks,
    )  # fmt: skip
    return y


def backward(x: Tensor, y: Tensor, grads: list[Tensor], residual: bool, weight: Tensor, bias: Tensor, mean: Tensor,
             scale: Tensor, relu: bool, dweight: Tensor, dbias: Tensor) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(gradient of the input, of the residual); those of weight and bias are written where they belong."""
    plan = Plan.of(x)
    reading = plan.reduce()
    parts = torch.empty(reading.parts, 2, plan.channels, device=x.device)
    kind = {"RELU": relu, "RESIDUAL": residual, "TWO": len(grads) > 1}
    dx = torch.empty_like(x)
    dres = torch.empty_like(x) if residual else None
    _reduce_gradient[reading.grid](
        x, y, grads[0], grads[-1], weight, bias, mean, scale, parts,
        plan.rows, reading.stretch, **kind, **reading.blocks,
    )  # fmt: skip
    count = plan.fold(parts)
    writing = plan.write(4096 if x.numel() >= 2**22 else 8192)
    _pass_gradient[writing.grid](
        x, y, grads[0], grads[-1], dx, dx if dres is None else dres, weight, bias, mean, scale, dweight, dbias, parts,
        count, plan.rows, writing.stretch, P=triton.next_power_of_2(count), **kind, **writing.blocks,
    )  # fmt: skip
    return dx, dres
