"""The operations that the fused networks are made of. Their parameters' gradients do not travel through autograd:
backward writes them where the optimizer reads them."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from dcil.engine import kernels
from dcil.engine.streams import new_stream


class SideStream:
    """Where weight gradients are computed, if wanted on a side stream: nothing in the backward pass waits for them but
    its end, when those that cuDNN has put elsewhere are brought home together."""

    def __init__(self, device: torch.device, beside: bool, depth: int = 8) -> None:
        self.stream = new_stream(device) if beside and device.type == "cuda" else None
        self.depth = depth
        self.pending: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()
        self.away: list[tuple[Tensor, Tensor]] = []  # (home, gradient)
        self.used = False  # since the last join

    def run(self, work: Any, *held: Tensor) -> None:
        """Do ``work`` beside the current stream; the tensors it reads are held until it is done."""
        self.used = True
        if self.stream is None:
            work()  # on the CPU, or where side streams do not pay
            return
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            work()
        self.pending.append((self.stream.record_event(), held))
        if len(self.pending) > self.depth:  # bounds the memory that is held
            here.wait_event(self.pending.popleft()[0])

    def join(self) -> bool:
        """The gradients are there; were there any?"""
        used, self.used = self.used, False
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            self.pending.clear()
        if self.away:
            homes, gradients = ([flat(tensor) for tensor in side] for side in zip(*self.away, strict=True))
            torch._foreach_copy_(homes, gradients)  # one kernel; as many small copies take longer than their bytes
            self.away.clear()
        return used


def flat(weight: Tensor) -> Tensor:
    """As it lies in memory, channels last: a view."""
    return weight.permute(0, 2, 3, 1).reshape(-1)


class _Conv(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, conv: Conv) -> Tensor:
        ctx.conv = conv
        ctx.save_for_backward(x)
        ctx.groups = kernels.conv.supported_groups(x, conv.value, conv.kind, conv.blocks) if kernels.AVAILABLE else 0
        if ctx.groups:
            return kernels.conv.forward(x, conv.value, ctx.groups)
        return torch.ops.aten.convolution(x, conv.value, *conv.how)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None]:
        (x,), conv = ctx.saved_tensors, ctx.conv
        dy = dy.contiguous(memory_format=torch.channels_last)
        args = (dy, x, conv.value, None, *conv.how[1:])

        def weight_gradient() -> None:
            if ctx.groups:
                kernels.conv.weight_gradient(x, dy, conv.gradient, ctx.groups)
            else:
                found = torch.ops.aten.convolution_backward(*args, [False, True, False])[1]
                conv.lane.away.append((conv.gradient, found))

        conv.lane.run(weight_gradient, x, dy)
        if not ctx.needs_input_grad[0]:
            return None, None, None
        if ctx.groups:
            return kernels.conv.input_gradient(dy, conv.value, ctx.groups), None, None
        return torch.ops.aten.convolution_backward(*args, [True, False, False])[0], None, None


class Conv(nn.Module):
    """A convolution whose weight and weight gradient live in given memory; ``blocks`` are on the weight's diagonal."""

    value: Tensor
    gradient: Tensor

    def __init__(self, name: str, like: nn.Conv2d, lane: SideStream, device: torch.device, blocks: int) -> None:
        super().__init__()
        self.name, self.lane, self.blocks = name, lane, blocks
        self.how = (None, like.stride, like.padding, like.dilation, False, [0, 0], like.groups)
        self.kind = tuple(like.stride), tuple(like.padding), tuple(like.dilation), like.groups
        # Without an input that wants a gradient, autograd would not come by.
        self.wants = torch.zeros((), device=device, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.value.dtype).contiguous(memory_format=torch.channels_last)
        out: Tensor = _Conv.apply(x, self.wants, self)  # type: ignore[no-untyped-call]
        return out


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, wants: Tensor, norm: Norm) -> Any:
        running = norm.running if norm.track else None
        forward = kernels.norm.forward if kernels.AVAILABLE and x.is_cuda else plain_forward
        x = x.contiguous(memory_format=torch.channels_last)
        if residual is not None:
            residual = residual.contiguous(memory_format=torch.channels_last)
        y, mean, scale = forward(x, residual, norm.weight, norm.bias, norm.eps, norm.relu, running, norm.momentum)
        ctx.norm, ctx.residual = norm, residual is not None
        ctx.save_for_backward(x, y, mean, scale)
        ctx.set_materialize_grads(False)
        return (y, y.detach()) if norm.outputs == 2 else y

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor, Tensor | None, None, None]:
        (x, y, mean, scale), norm = ctx.saved_tensors, ctx.norm
        grads = [dy.contiguous(memory_format=torch.channels_last) for dy in dys if dy is not None]
        backward = kernels.norm.backward if kernels.AVAILABLE and x.is_cuda else plain_backward
        dx, dres = backward(
            x, y, grads, ctx.residual, norm.weight, norm.bias, mean, scale, norm.relu, norm.dweight, norm.dbias
        )
        return dx, dres, None, None


class Norm(nn.Module):
    """Batch norm in training, then the residual is added and negative values cut, as far as wanted.

    With two readers it hands out its result twice, so that their gradients come in separately and are summed in the
    same kernel.
    """

    def __init__(self, like: nn.BatchNorm2d, at: dict[str, Tensor], relu: bool) -> None:
        super().__init__()
        self.eps, self.momentum, self.relu = like.eps, float(like.momentum or 0.0), relu
        self.outputs, self.track = 1, True
        self.weight, self.bias = at["weight"], at["bias"]
        self.dweight, self.dbias = at["dweight"], at["dbias"]
        self.running = at["running_mean"], at["running_var"]
        self.wants = torch.zeros((), device=self.weight.device, requires_grad=True)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if self.training:
            return _Norm.apply(x, residual, self.wants, self)  # type: ignore[no-untyped-call]
        x = x.contiguous(memory_format=torch.channels_last)
        if residual is not None:
            residual = residual.contiguous(memory_format=torch.channels_last)
        kernel = kernels.norm.evaluate if kernels.AVAILABLE and x.is_cuda else plain_evaluate
        y = kernel(x, residual, self.weight, self.bias, self.eps, self.relu, self.running)
        return (y, y) if self.outputs == 2 else y


class _Pool(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: tuple[int, int, int]) -> Tensor:
        y, winner = kernels.pool.forward(x.contiguous(memory_format=torch.channels_last), *how)
        ctx.save_for_backward(winner)
        ctx.how, ctx.size = how, x.shape[2:]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        dy = dy.contiguous(memory_format=torch.channels_last)
        (winner,) = ctx.saved_tensors
        return kernels.pool.backward(dy, winner, ctx.size, *ctx.how), None


LARGEST_WINDOW = 8  # pixels each way: the kernel goes through them one by one and numbers them in a byte


class Pool(nn.Module):
    """Max pooling of square windows."""

    def __init__(self, like: nn.MaxPool2d) -> None:
        super().__init__()
        self.like, self.how = like, tuple[Any, ...]((like.kernel_size, like.stride, like.padding))
        square = all(isinstance(number, int) for number in self.how) and like.dilation == 1
        plain = square and max(self.how) <= LARGEST_WINDOW
        self.fast = kernels.AVAILABLE and plain and not like.ceil_mode and not like.return_indices

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Pool.apply(x, self.how) if self.fast and x.is_cuda else self.like(x)  # type: ignore[no-untyped-call]
        return out


def _wide(vector: Tensor) -> Tensor:
    return vector[:, None, None]


def plain_forward(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, relu: bool,
                  running: tuple[Tensor, Tensor] | None, momentum: float) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What the kernels compute, in plain torch."""
    wide = x.float()
    variance, mean = torch.var_mean(wide, (0, 2, 3), correction=0)
    scale = torch.rsqrt(variance + eps)
    if running is not None:
        rows = x.numel() // x.shape[1]
        running[0].lerp_(mean, momentum)
        running[1].lerp_(variance * (rows / (rows - 1)), momentum)
    y = (wide - _wide(mean)) * _wide(scale * weight) + _wide(bias)
    return finished(y, residual, relu, x.dtype), mean, scale


def plain_evaluate(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, relu: bool,
                   running: tuple[Tensor, Tensor]) -> Tensor:  # fmt: skip
    mean, variance = running
    y = (x.float() - _wide(mean)) * _wide(torch.rsqrt(variance + eps) * weight) + _wide(bias)
    return finished(y, residual, relu, x.dtype)


def finished(y: Tensor, residual: Tensor | None, relu: bool, dtype: torch.dtype) -> Tensor:
    y = y if residual is None else y + residual.float()
    return (y.relu() if relu else y).to(dtype)


def plain_backward(
    x: Tensor, y: Tensor, grads: list[Tensor], residual: bool, weight: Tensor, bias: Tensor,
    mean: Tensor, scale: Tensor, relu: bool, dweight: Tensor, dbias: Tensor,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    g = grads[0].float() if len(grads) == 1 else grads[0].float() + grads[1].float()
    g = torch.where(y > 0, g, 0.0) if relu else g
    unit = (x.float() - _wide(mean)) * _wide(scale)
    dbias.copy_(g.sum((0, 2, 3)))
    dweight.copy_((g * unit).sum((0, 2, 3)))
    rows = x.numel() // x.shape[1]
    dx = _wide(weight * scale) * (g - _wide(dbias / rows) - unit * _wide(dweight / rows))
    return dx.to(x.dtype), g.to(x.dtype) if residual else None
