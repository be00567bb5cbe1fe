"""EMA: an exponential moving average of a SparseNet, to evaluate and to hand back."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from dcil.copies import copied
from dcil.errors import UserError, described
from dcil.fsdp import is_block
from dcil.net import SparseNet


class EMA(nn.Module):
    """average <- decay * average + (1 - decay) * value, for weights and the norm statistics of every path.

        ema = EMA(net, decay=0.999)
        opt.step(); ema.update()
        ema(x)                       # the averaged pruned net's output
        sparse = ema.finalize()

    Masks, counters and the method's state are taken as they are: an average of masks is no mask. All weights are
    averaged, pruned ones too, and the present masks are applied afterwards, so that the result has their sparsity.

    decay    weight of the past
    warmup   use min(decay, (1 + updates) / (10 + updates)), so that the random start is forgotten soon
    """

    def __init__(self, net: SparseNet, decay: float = 0.999, warmup: bool = False) -> None:
        super().__init__()
        if not isinstance(net, SparseNet):
            raise UserError(f"EMA must average a SparseNet, got {described(net)} (for DDP: its .module)")
        if not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            raise UserError(f"EMA: decay must be >= 0 and < 1, got {described(decay)} (0.999 is common)")
        if not isinstance(warmup, bool):
            raise UserError(f"EMA: warmup must be True or False, got {described(warmup)}")
        if any(map(is_block, net.modules())):
            raise UserError(
                "EMA must average a net whose weights are whole, got one that fully_shard was called on: train with "
                "DistributedDataParallel(net), or average the sharded state dicts yourself"
            )
        self.decay, self.warmup = decay, warmup
        self.net = cast(SparseNet, copied(net)).requires_grad_(False).eval()
        self.register_buffer("updates", torch.zeros((), dtype=torch.long, device="cpu"))
        # Not a submodule: its parameters are not the average's, and its state is saved by its owner.
        object.__setattr__(self, "source", net)

    updates: torch.Tensor
    source: SparseNet

    def update(self) -> None:
        """Move the average towards the net's present values; called after every optimizer step."""
        self.average(self.next_weight())
        self.net.take_position(self.source)

    def next_weight(self) -> float:
        """Count an update; returns the weight of the present values in it."""
        self.updates += 1
        done = int(self.updates)
        return 1 - (min(self.decay, (1 + done) / (10 + done)) if self.warmup else self.decay)

    @torch.no_grad()
    def average(self, weight: float | torch.Tensor) -> None:
        """average <- average + weight * (value - average): work on the device and nothing else."""
        averaged, values = [], []
        # Not state_dict(): that has tied tensors twice, and leaves out buffers that are not saved.
        own = dict(self.net.named_parameters()) | dict(self.net.named_buffers())
        for name, value in (*self.source.named_parameters(), *self.source.named_buffers()):
            if (value.is_floating_point() or value.is_complex()) and not name.startswith("_"):
                averaged.append(own[name])
                values.append(value.detach().to(own[name]))  # the average may be wider, or elsewhere
            else:
                own[name].copy_(value)
        if isinstance(weight, torch.Tensor):
            steps = torch._foreach_sub(values, averaged)
            torch._foreach_mul_(steps, weight)
            torch._foreach_add_(averaged, steps)
        else:
            torch._foreach_lerp_(averaged, values, weight)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The averaged pruned net's output."""
        return self.net.path("pruned", *args, **kwargs)

    def finalize(self) -> nn.Module:
        """The averaged pruned net, as ``SparseNet.finalize`` gives it."""
        return self.net.finalize()

    def train(self, mode: bool = True) -> EMA:
        """Stay in evaluation mode: an average is never trained."""
        return super().train(False)
