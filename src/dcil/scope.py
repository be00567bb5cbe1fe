"""Scopes: how the pruned groups are distributed over the layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dcil.validation import Validated
from dcil.weight import PrunableWeight


@dataclass(frozen=True)
class Scope(Validated):
    """Gives each layer its share of the sparsity."""

    def sparsities(self, layers: Sequence[PrunableWeight], sparsity: float) -> list[float] | None:
        """The sparsity of each layer; None leaves it to one ranking across all layers."""
        raise NotImplementedError("abstract: a scope defines sparsities")

    def counts(self, shares: Sequence[float], sizes: Sequence[int], total: int, limits: Sequence[int]) -> list[int]:
        """The groups to prune of each layer, given its sparsity; ``total`` in all, none above its limit."""
        return apportion(shares, sizes, total, limits)


@dataclass(frozen=True)
class Global(Scope):
    """Rank all layers together: the scores decide."""

    def sparsities(self, layers: Sequence[PrunableWeight], sparsity: float) -> list[float] | None:
        return None


@dataclass(frozen=True)
class Uniform(Scope):
    """Give every layer the same sparsity."""

    def sparsities(self, layers: Sequence[PrunableWeight], sparsity: float) -> list[float] | None:
        return [sparsity] * len(layers)


@dataclass(frozen=True)
class UniformFloor(Uniform):
    """Give every layer the same sparsity, rounded down in each: in all, fewer groups may go than were asked for."""

    def counts(self, shares: Sequence[float], sizes: Sequence[int], total: int, limits: Sequence[int]) -> list[int]:
        return [min(int(share * size), limit) for share, size, limit in zip(shares, sizes, limits, strict=True)]


@dataclass(frozen=True)
class ERK(Scope):
    """Erdős–Rényi(-kernel): density of a layer ~ (sum of its dimensions) / (product of its dimensions).

    A layer that would exceed 1 is dense, and the others share what is left (Evci et al. 2020, appendix H).
    ``kernel=False`` counts input and output channels only (Mocanu et al. 2018).
    """

    kernel: bool = True

    def sparsities(self, layers: Sequence[PrunableWeight], sparsity: float) -> list[float] | None:
        sizes = [layer.weight.numel() for layer in layers]
        shapes = [layer.weight.shape if self.kernel else layer.weight.shape[:2] for layer in layers]
        raw = [sum(shape) / math.prod(shape) for shape in shapes]
        dense: set[int] = set()
        while True:
            left = (1 - sparsity) * sum(sizes) - sum(sizes[i] for i in dense)
            free = [i for i in range(len(layers)) if i not in dense]
            scale = left / sum(raw[i] * sizes[i] for i in free) if free else 0.0
            over = {i for i in free if raw[i] * scale > 1}
            if not over:
                return [0.0 if i in dense else 1 - raw[i] * scale for i in range(len(layers))]
            dense |= over


def apportion(
    shares: Sequence[float], sizes: Sequence[int], total: int, limits: Sequence[int] | None = None
) -> list[int]:
    """Whole numbers near ``shares[i] * sizes[i]`` whose sum is ``total``, none above its limit (its size).

    The largest-remainder method: rounded down, then the largest remainders get one more; of equal ones the first.
    """
    exact = [share * size for share, size in zip(shares, sizes, strict=True)]
    limits = sizes if limits is None else limits
    found = [min(int(value), limit) for value, limit in zip(exact, limits, strict=True)]
    order = sorted(range(len(sizes)), key=lambda i: (found[i] - exact[i], i))
    missing = max(0, min(total, sum(limits))) - sum(found)
    step = 1 if missing > 0 else -1
    while missing := abs(missing):  # one more (or less) for each in turn; as many whole turns at once as all can take
        room = {i: limits[i] - found[i] if step > 0 else found[i] for i in order[::step]}
        turn = [i for i in room if room[i]][:missing]
        turns = max(1, min(missing // len(turn), min(room[i] for i in turn)))
        for i in turn:
            found[i] += step * turns
        missing -= turns * len(turn)
    return found
