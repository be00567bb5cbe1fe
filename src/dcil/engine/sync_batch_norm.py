"""Batch normalisation over the global batch of several processes, so that their number changes no result.

On CUDA this is torch's SyncBatchNorm, which does not run on the CPU; there the same equations are written out:

    mean = sum(x) / n,    var = sum((x - mean)^2) / n,    y = (x - mean) / sqrt(var + eps) * weight + bias

with sums, and the gradients that come back through them, over the images of all processes. A process whose shard of a
batch is empty takes part with sums of 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class CudaSyncBatchNorm(nn.SyncBatchNorm):
    """SyncBatchNorm that accepts an empty half-precision batch, where torch's mixes up the type of the statistics."""

    def forward(self, input: Tensor) -> Tensor:
        half = not input.numel() and input.dtype in (torch.bfloat16, torch.float16)
        out: Tensor = super().forward(input.float() if half else input)
        return out.to(input.dtype)


class CpuSyncBatchNorm(_BatchNorm):
    """Synchronised batch norm written out for the CPU."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            out: Tensor = super().forward(input)
            return out
        others = [d for d in range(input.dim()) if d != 1]
        shape = [-1 if d == 1 else 1 for d in range(input.dim())]
        sums = all_reduce(torch.cat([input.sum(others), input.new_full((1,), input.numel() // input.shape[1])]))
        count = sums[-1]
        mean = sums[:-1] / count
        centred = input - mean.view(shape)
        var = all_reduce(centred.square().sum(others)) / count
        self.update_running(mean.detach(), (var * count / (count - 1)).detach())
        scale = torch.rsqrt(var + self.eps) * (1 if self.weight is None else self.weight)
        out = centred * scale.view(shape)
        return out if self.bias is None else out + self.bias.view(shape)

    def update_running(self, mean: Tensor, var: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        part = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, part)
        self.running_var.lerp_(var, part)

    def _check_input_dim(self, input: Tensor) -> None: ...


class _AllReduce(torch.autograd.Function):
    """Sums over all processes; every process's loss depends on the sum, so its gradient is summed as well."""

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


def all_reduce(part: Tensor) -> Tensor:
    """Return the differentiable sum over all processes."""
    found: Tensor = _AllReduce.apply(part)  # type: ignore[no-untyped-call]
    return found


def synchronise_batch_norms(net: nn.Module, device: torch.device) -> None:
    """Replace every batch norm in ``net``, private copies included, by a synchronised one with the same tensors."""
    kind = CudaSyncBatchNorm if device.type == "cuda" else CpuSyncBatchNorm
    for parent in list(net.modules()):
        for name, norm in list(parent.named_children()):
            if isinstance(norm, _BatchNorm):
                new = kind(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
                new._parameters.update(norm._parameters)
                new._buffers.update(norm._buffers)
                parent.add_module(name, new.train(norm.training))
