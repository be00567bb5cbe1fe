"""Rank all weights by magnitude on the flat parameters: a few kernels for the whole network."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from dcil import Global, Magnitude, SparseNet, StepContext, Weight
from dcil.engine import kernels
from dcil.engine.cuda.flat import FlatParameters, view_at
from dcil.method import Selection
from dcil.selection import kth_smallest_key

LAST = 2**31 - 1


class Ranking:
    """Updates the masks exactly as ``Method.update_masks`` does, ties included.

    ``tie_order`` has each weight's index in layer order, by which ties are broken, and LAST for the padding.
    """

    def __init__(self, net: SparseNet, flat: FlatParameters) -> None:
        self.method, self.flat = net.method, flat
        self.tie_order = torch.full((flat.prunable_size,), LAST, dtype=torch.int32, device=flat.device)
        self.size = 0
        for layer in net.layers:
            count = layer.weight.numel()
            numbers = torch.arange(count, dtype=torch.int32, device=flat.device)
            here = view_at(self.tie_order, flat.packed.starts[id(layer.weight)], layer.weight.shape)
            here.copy_(Weight().mask(layer, numbers + self.size))
            self.size += count
        self.gaps = (self.tie_order == LAST).nonzero().flatten()
        self.kernels = kernels.AVAILABLE and flat.device.type == "cuda"
        if self.kernels:  # warm up: Triton must not compile or load while another run is recorded
            one = torch.ones((), dtype=torch.long, device=flat.device)
            kernels.select.keep_largest(self.keys(), self.tie_order, one, flat.masks.clone())

    def __call__(self, context: StepContext) -> Tensor:
        """Update the masks; return the numbers of weights grown and dropped, as ``Method.update_masks``."""
        pruned, masks = int(self.method.sparsity_at(context.step) * self.size), self.flat.masks
        if self.kernels and pruned > 0:
            return kernels.select.keep_largest(
                self.keys(), self.tie_order, torch.full((), pruned, device=masks.device), masks
            )
        old, new = masks.clone(), self.kept(pruned)
        masks.copy_(new)
        return torch.stack([(new & ~old).sum(), (old & ~new).sum()])

    def keys(self) -> Tensor:
        """Return the magnitudes as order-preserving integers; padding sorts last."""
        scores = self.flat.weights[: self.flat.prunable_size].abs()
        return scores.index_fill_(0, self.gaps, torch.inf).view(torch.int32)

    def kept(self, pruned: int) -> Tensor:
        """Return the mask that ``dcil.selection.keep_largest`` gives for the magnitudes; padding is kept."""
        if pruned == 0:
            return torch.ones_like(self.flat.masks)
        keys = self.keys()
        threshold = kth_smallest_key(keys, torch.full((), pruned, device=keys.device))
        above, tied = keys > threshold, keys == threshold
        ties_kept = keys.numel() - pruned - above.sum()
        last = kth_smallest_key(torch.where(tied, self.tie_order, LAST), ties_kept)
        return above | (tied & (self.tie_order <= last) & (ties_kept > 0))


def is_global_magnitude(net: SparseNet, key: Hashable) -> bool:
    """Return whether the key stands for a global ranking of single weights by magnitude."""
    if not isinstance(key, Selection) or len({id(layer.weight) for layer in net.layers}) < len(net.layers):
        return False
    return (key.granularity, key.criterion, key.scope, key.min_kept) == (Weight(), Magnitude(), Global(), 0)
