"""Rank all weights by magnitude in one flat tensor: a few kernels for the whole network."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
from torch import Tensor

from dcil import Global, Magnitude, SparseNet, StepContext, Weight
from dcil.declared import Selection
from dcil.engine import kernels
from dcil.engine.cuda.flat import FlatParameters, view_at
from dcil.selection import kth_smallest_key

LAST = 2**31 - 1


class Ranking:
    """Updates the masks exactly as ``Method.update_masks`` does, ties included.

    The masks become views of one flat tensor. ``tie_order`` has each weight's index in layer order, by which ties are
    broken, and LAST for padding; None: the flat order is that. Weights that are not flat are gathered for each update.
    """

    def __init__(self, net: SparseNet, flat: FlatParameters | None) -> None:
        self.net, self.flat, device = net, flat, net.first_mask.device
        self.size = sum(layer.weight.numel() for layer in net.layers)
        self.gaps = torch.zeros(0, dtype=torch.long, device=device)
        self.tie_order: Tensor | None
        if flat is None:
            self.tie_order = None if in_order(net) else torch.cat([numbers.reshape(-1) for numbers in numbered(net)])
            self.masks = gathered_masks(net)
        else:
            self.masks, self.tie_order = flat.masks, tie_order(net, flat)
            self.gaps = (self.tie_order == LAST).nonzero().flatten()
        self.pruned = torch.ones((), dtype=torch.long, device=device)
        self.kernels = kernels.AVAILABLE and device.type == "cuda"
        if self.kernels:  # warm up: Triton must not compile or load while another run is recorded
            kernels.select.keep_largest(self.keys(), self.tie_order, self.pruned, self.masks.clone())

    def prepare(self, context: StepContext) -> bool:
        """Set how many weights are pruned; return whether any is."""
        pruned = int(self.net.method.sparsity_at(context.step) * self.size)
        self.pruned.fill_(pruned)
        return pruned > 0

    def __call__(self, context: StepContext) -> Tensor:
        """Update the masks; return the numbers of weights grown and dropped, as ``Method.update_masks``."""
        if not self.prepare(context):
            changes = torch.stack([(~self.masks).sum(), self.pruned])
            self.masks.fill_(True)
            return changes
        return self.select()

    def select(self) -> Tensor:
        """Prune the ``pruned`` smallest weights: work that can be recorded."""
        if self.kernels:
            return kernels.select.keep_largest(self.keys(), self.tie_order, self.pruned, self.masks)
        old, new = self.masks.clone(), self.kept()
        self.masks.copy_(new)
        return torch.stack([(new & ~old).sum(), (old & ~new).sum()])

    def keys(self) -> Tensor:
        """Return the magnitudes as order-preserving integers; padding sorts last."""
        if self.flat is None:
            weights = torch.cat([layer.weight.detach().reshape(-1) for layer in self.net.layers])
            return weights.float().abs_().view(torch.int32)
        scores = self.flat.weights[: self.flat.prunable_size].abs()
        return scores.index_fill_(0, self.gaps, torch.inf).view(torch.int32)

    def kept(self) -> Tensor:
        """Return the mask that ``dcil.selection.keep_largest`` gives for the magnitudes; padding is kept."""
        keys = self.keys()
        threshold = kth_smallest_key(keys, self.pruned)
        above, tied = keys > threshold, keys == threshold
        ties_kept = keys.numel() - self.pruned - above.sum()
        order = self.tie_order
        order = torch.arange(keys.numel(), dtype=torch.int32, device=keys.device) if order is None else order
        last = kth_smallest_key(torch.where(tied, order, LAST), ties_kept)
        return above | (tied & (order <= last) & (ties_kept > 0))


def numbered(net: SparseNet) -> Iterator[Tensor]:
    """Yield each weight's indices in layer order, shaped like the weight."""
    done = 0
    for layer in net.layers:
        numbers = torch.arange(layer.weight.numel(), dtype=torch.int32, device=layer.weight.device)
        yield Weight().mask(layer, numbers + done)
        done += layer.weight.numel()


def in_order(net: SparseNet) -> bool:
    """Return whether the weights lie in memory in the order by which ties are broken."""
    return all(bool((numbers.reshape(-1).diff() == 1).all()) for numbers in numbered(net))


def tie_order(net: SparseNet, flat: FlatParameters) -> Tensor:
    """Return each weight's index in layer order, at its place in the flat memory."""
    found = torch.full((flat.prunable_size,), LAST, dtype=torch.int32, device=flat.device)
    for layer, numbers in zip(net.layers, numbered(net), strict=True):
        view_at(found, flat.packed.starts[id(layer.weight)], layer.weight.shape).copy_(numbers)
    return found


def gathered_masks(net: SparseNet) -> Tensor:
    """Move the masks into one tensor, in layer order, and make each a view of it."""
    found = torch.cat([layer.mask.reshape(-1) for layer in net.layers])
    places = torch.split(found, [layer.mask.numel() for layer in net.layers])
    for layer, place in zip(net.layers, places, strict=True):
        layer.mask.data = place.view(layer.mask.shape)
    return found


def is_global_magnitude(net: SparseNet, key: Hashable) -> bool:
    """Return whether the key stands for a global ranking of single weights by magnitude, in float32 at most."""
    layers = net.layers
    if not isinstance(key, Selection) or len({id(layer.weight) for layer in layers}) < len(layers):
        return False
    if any(layer.weight.dtype == torch.double for layer in layers):
        return False
    return (key.granularity, key.criterion, key.scope, key.min_kept) == (Weight(), Magnitude(), Global(), 0)
