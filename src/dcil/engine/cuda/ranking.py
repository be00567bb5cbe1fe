"""The usual mask update, one ranking of all single weights by magnitude, on the flat parameters: in the order in which
they lie in memory, a handful of kernels for the whole network."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from dcil import Global, Magnitude, SparseNet, StepContext, Weight
from dcil.engine import kernels
from dcil.engine.cuda.flat import Flat, window
from dcil.method import Selection
from dcil.selection import kth_smallest_key

LAST = 2**31 - 1


class Ranking:
    """Updates the masks exactly as ``Method.update`` does, ties included.

    ``place`` holds for every weight its place in the order that ties are decided by, LAST for the gaps between layers.
    """

    def __init__(self, net: SparseNet, flat: Flat) -> None:
        self.method, self.flat = net.method, flat
        self.place = torch.full((flat.head,), LAST, dtype=torch.int32, device=flat.device)
        self.size = 0
        for layer in net.layers:
            count = layer.weight.numel()
            numbers = torch.arange(count, dtype=torch.int32, device=flat.device)
            here = window(self.place, flat.packed.starts[id(layer.weight)], layer.weight.shape)
            here.copy_(Weight().mask(layer, numbers + self.size))
            self.size += count
        self.gaps = (self.place == LAST).nonzero().flatten()
        self.kernels = kernels.AVAILABLE and flat.device.type == "cuda"
        if self.kernels:  # once for nothing: Triton compiles and loads them now, not while another run is recorded
            one = torch.ones((), dtype=torch.long, device=flat.device)
            kernels.select.keep_largest(self.keys(), self.place, one, flat.masks.clone())

    def __call__(self, context: StepContext) -> Tensor:
        """As ``Method.update_masks``."""
        pruned, masks = int(self.method.sparsity_at(context.step) * self.size), self.flat.masks
        if self.kernels and pruned > 0:
            return kernels.select.keep_largest(
                self.keys(), self.place, torch.full((), pruned, device=masks.device), masks
            )
        old, new = masks.clone(), self.kept(pruned)
        masks.copy_(new)
        return torch.stack([(new & ~old).sum(), (old & ~new).sum()])

    def keys(self) -> Tensor:
        """The squares, as integers in the same order; the gaps come last."""
        scores = self.flat.weights[: self.flat.head].square()
        return scores.index_fill_(0, self.gaps, torch.inf).view(torch.int32)

    def kept(self, pruned: int) -> Tensor:
        """As ``dcil.selection.keep_largest`` of the squares; the gaps are kept too."""
        if pruned == 0:
            return torch.ones_like(self.flat.masks)
        keys = self.keys()
        threshold = kth_smallest_key(keys, torch.full((), pruned, device=keys.device))
        above, tied = keys > threshold, keys == threshold
        room = keys.numel() - pruned - above.sum()
        last = kth_smallest_key(torch.where(tied, self.place, LAST), room)
        return above | (tied & (self.place <= last) & (room > 0))


def ranks(net: SparseNet, key: Hashable) -> bool:
    """Whether the update with this key is the ranking of this file."""
    if not isinstance(key, Selection) or len({id(layer.weight) for layer in net.layers}) < len(net.layers):
        return False
    return (key.granularity, key.criterion, key.scope) == (Weight(), Magnitude(), Global())
