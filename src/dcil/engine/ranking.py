"""The usual mask update, one ranking of all single weights by magnitude, on the flat parameters: in the order in which
they lie in memory, a handful of kernels for the whole network."""

from __future__ import annotations

import torch
from torch import Tensor

from dcil import Global, Magnitude, Method, SparseNet, Weight
from dcil.engine.flat import Flat, window
from dcil.kth import smallest_key
from dcil.method import Moment

try:
    from dcil.engine import kth_triton
except ImportError:
    kth_triton = None  # type: ignore[assignment,unused-ignore]

LAST = 2**31 - 1


class Ranking:
    """Moves the masks exactly as ``Method.update`` does, ties included.

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
        kernels = kth_triton is not None and flat.device.type == "cuda"
        self.smallest = kth_triton.smallest_key if kernels else smallest_key

    def __call__(self, now: Moment) -> Tensor:
        """As ``Method.move_masks``."""
        pruned = int(self.method.sparsity_at(now.step) * self.size)
        old, new = self.flat.masks.clone(), self.kept(pruned)
        self.flat.masks.copy_(new)
        return torch.stack([(new & ~old).sum(), (old & ~new).sum()])

    def kept(self, pruned: int) -> Tensor:
        """As ``dcil.masks.keep_largest`` of the squares; the gaps are kept too."""
        if pruned == 0:
            return torch.ones_like(self.flat.masks)
        scores = self.flat.weights[: self.flat.head].square()
        keys = scores.index_fill_(0, self.gaps, torch.inf).view(torch.int32)  # in the order of what is not negative
        threshold = self.smallest(keys, torch.full((), pruned, device=keys.device))
        above, tied = keys > threshold, keys == threshold
        room = keys.numel() - pruned - above.sum()
        last = self.smallest(torch.where(tied, self.place, LAST), room)
        return above | (tied & (self.place <= last) & (room > 0))


def fits(net: SparseNet) -> bool:
    """Is the method's update this one?"""
    method = net.method
    plain = type(method).update is Method.update and type(method).group_scores is Method.group_scores
    usual = (Weight, Magnitude, Global) == tuple(map(type, (method.granularity, method.criterion, method.scope)))
    return plain and usual and len({id(layer.weight) for layer in net.layers}) == len(net.layers)
