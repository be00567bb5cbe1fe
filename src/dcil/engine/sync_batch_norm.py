"""Batch normalisation over the joint batch of a team, so that the number of processes changes no result.

On CUDA this is torch's SyncBatchNorm. That knows no CPU, where the same equations are written out:

    mean = sum(x) / n,    var = sum((x - mean)^2) / n,    y = (x - mean) / sqrt(var + eps) * weight + bias

with sums, and the gradients that come back through them, over the images of all processes. A process whose share of a
batch is empty takes part with sums of nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class OnCuda(nn.SyncBatchNorm):
    """SyncBatchNorm, which forgets that statistics are float32 when a process has no images in half precision."""

    def forward(self, input: Tensor) -> Tensor:
        half = not input.numel() and input.dtype in (torch.bfloat16, torch.float16)
        out: Tensor = super().forward(input.float() if half else input)
        return out.to(input.dtype)


class OnCpu(_BatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            out: Tensor = super().forward(input)
            return out
        others = [d for d in range(input.dim()) if d != 1]
        shape = [-1 if d == 1 else 1 for d in range(input.dim())]
        sums = total(torch.cat([input.sum(others), input.new_full((1,), input.numel() // input.shape[1])]))
        count = sums[-1]
        mean = sums[:-1] / count
        centred = input - mean.view(shape)
        var = total(centred.square().sum(others)) / count
        self.track(mean.detach(), (var * count / (count - 1)).detach())
        scale = torch.rsqrt(var + self.eps) * (1 if self.weight is None else self.weight)
        out = centred * scale.view(shape)
        return out if self.bias is None else out + self.bias.view(shape)

    def track(self, mean: Tensor, var: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        part = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, part)
        self.running_var.lerp_(var, part)

    def _check_input_dim(self, input: Tensor) -> None: ...


class Total(torch.autograd.Function):
    """The sum over all processes; every process's loss depends on it, so its gradient is summed as well."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        found = part.clone()
        dist.all_reduce(found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        found = gradient.contiguous().clone()
        dist.all_reduce(found)
        return found


def total(part: Tensor) -> Tensor:
    found: Tensor = Total.apply(part)  # type: ignore[no-untyped-call]
    return found


def synchronise_batch_norms(net: nn.Module, device: torch.device) -> None:
    """Every batch norm in ``net``, private copies included, becomes one over the joint batch with the same tensors."""
    kind = OnCuda if device.type == "cuda" else OnCpu
    for parent in list(net.modules()):
        for name, norm in list(parent.named_children()):
            if isinstance(norm, _BatchNorm):
                new = kind(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
                new._parameters.update(norm._parameters)
                new._buffers.update(norm._buffers)
                parent.add_module(name, new.train(norm.training))
