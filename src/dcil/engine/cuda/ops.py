"""Operations of the fused networks. The gradients of their parameters bypass autograd: backward writes them where
the optimizer reads them."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from dcil.engine import kernels
from dcil.engine.streams import new_stream


class SideStream:
    """Computes weight gradients, on a stream of its own if ``enabled``; only the end of the backward pass waits for it.
    Gradients that cuDNN allocates are then copied together to their fixed memory."""

    def __init__(self, device: torch.device, enabled: bool, depth: int = 8) -> None:
        self.stream = new_stream(device) if enabled and device.type == "cuda" else None
        self.depth = depth
        self.pending: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()
        self.copies: list[tuple[Tensor, Tensor]] = []  # (target, gradient)
        self.used = False  # since the last join

    def run(self, work: Any, *held: Tensor) -> None:
        """Do ``work`` concurrently with the current stream; ``held``, the tensors it reads, live until it is done."""
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
        """Wait for the side stream; return whether it had work."""
        used, self.used = self.used, False
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            self.pending.clear()
        if self.copies:
            targets, gradients = ([flattened(tensor) for tensor in side] for side in zip(*self.copies, strict=True))
            torch._foreach_copy_(targets, gradients)  # one kernel: small copies are bound by their launches
            self.copies.clear()
        return used


def flattened(weight: Tensor) -> Tensor:
    """Return a channels_last tensor as a flat view, in the order of memory."""
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
                conv.side_stream.copies.append((conv.gradient, found))

        conv.side_stream.run(weight_gradient, x, dy)
        if not ctx.needs_input_grad[0]:
            return None, None, None
        if ctx.groups:
            return kernels.conv.input_gradient(dy, conv.value, ctx.groups), None, None
        return torch.ops.aten.convolution_backward(*args, [True, False, False])[0], None, None


class Conv(nn.Module):
    """Convolution with weight and weight gradient in given memory; the weight has ``blocks`` diagonal blocks."""

    value: Tensor
    gradient: Tensor

    def __init__(self, name: str, like: nn.Conv2d, side_stream: SideStream, device: torch.device, blocks: int) -> None:
        super().__init__()
        self.name, self.side_stream, self.blocks = name, side_stream, blocks
        self.how = (None, like.stride, like.padding, like.dilation, False, [0, 0], like.groups)
        self.kind = tuple(like.stride), tuple(like.padding), tuple(like.dilation), like.groups
        # autograd calls backward only if some input requires a gradient.
        self.anchor = torch.zeros((), device=device, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.value.dtype).contiguous(memory_format=torch.channels_last)
        out: Tensor = _Conv.apply(x, self.anchor, self)  # type: ignore[no-untyped-call]
        return out


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, anchor: Tensor, norm: Norm) -> Any:
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
    """Batch norm, then an optional residual sum and an optional ReLU.

    With two readers it returns its result twice: their gradients arrive separately and are summed in the same kernel.
    """

    def __init__(self, like: nn.BatchNorm2d, at: dict[str, Tensor], relu: bool) -> None:
        super().__init__()
        self.eps, self.momentum, self.relu = like.eps, float(like.momentum or 0.0), relu
        self.outputs, self.track = 1, True
        self.weight, self.bias = at["weight"], at["bias"]
        self.dweight, self.dbias = at["dweight"], at["dbias"]
        self.running = at["running_mean"], at["running_var"]
        self.anchor = torch.zeros((), device=self.weight.device, requires_grad=True)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if self.training:
            return _Norm.apply(x, residual, self.anchor, self)  # type: ignore[no-untyped-call]
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


LARGEST_WINDOW = 8  # pixels each way: the kernel stores the winner's index in a byte


class Pool(nn.Module):
    """Max pooling; one kernel each way for square windows."""

    def __init__(self, like: nn.MaxPool2d) -> None:
        super().__init__()
        self.like, self.how = like, tuple[Any, ...]((like.kernel_size, like.stride, like.padding))
        square = all(isinstance(number, int) for number in self.how) and like.dilation == 1
        plain = square and max(self.how) <= LARGEST_WINDOW
        self.fast = kernels.AVAILABLE and plain and not like.ceil_mode and not like.return_indices

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Pool.apply(x, self.how) if self.fast and x.is_cuda else self.like(x)  # type: ignore[no-untyped-call]
        return out


def _per_channel(vector: Tensor) -> Tensor:
    return vector[:, None, None]


def plain_forward(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, relu: bool,
                  running: tuple[Tensor, Tensor] | None, momentum: float) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute in torch what ``kernels.norm.forward`` computes."""
    wide = x.float()
    variance, mean = torch.var_mean(wide, (0, 2, 3), correction=0)
    scale = torch.rsqrt(variance + eps)
    if running is not None:
        rows = x.numel() // x.shape[1]
        running[0].lerp_(mean, momentum)
        running[1].lerp_(variance * (rows / (rows - 1)), momentum)
    y = (wide - _per_channel(mean)) * _per_channel(scale * weight) + _per_channel(bias)
    return add_relu(y, residual, relu, x.dtype), mean, scale


def plain_evaluate(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, relu: bool,
                   running: tuple[Tensor, Tensor]) -> Tensor:  # fmt: skip
    mean, variance = running
    y = (x.float() - _per_channel(mean)) * _per_channel(torch.rsqrt(variance + eps) * weight) + _per_channel(bias)
    return add_relu(y, residual, relu, x.dtype)


def add_relu(y: Tensor, residual: Tensor | None, relu: bool, dtype: torch.dtype) -> Tensor:
    y = y if residual is None else y + residual.float()
    return (y.relu() if relu else y).to(dtype)


def plain_backward(
    x: Tensor, y: Tensor, grads: list[Tensor], residual: bool, weight: Tensor, bias: Tensor,
    mean: Tensor, scale: Tensor, relu: bool, dweight: Tensor, dbias: Tensor,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    g = grads[0].float() if len(grads) == 1 else grads[0].float() + grads[1].float()
    g = torch.where(y > 0, g, 0.0) if relu else g
    unit = (x.float() - _per_channel(mean)) * _per_channel(scale)
    dbias.copy_(g.sum((0, 2, 3)))
    dweight.copy_((g * unit).sum((0, 2, 3)))
    rows = x.numel() // x.shape[1]
    dx = _per_channel(weight * scale) * (g - _per_channel(dbias / rows) - unit * _per_channel(dweight / rows))
    return dx.to(x.dtype), g.to(x.dtype) if residual else None
