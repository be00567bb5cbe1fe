"""What the drop-and-grow methods share: a random sparse network from the first step, its weights moved about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dcil.granularity import Granularity, Weight
from dcil.method import StepContext
from dcil.methods.zeroed import Zeroed, zero_pruned
from dcil.scope import Scope, Uniform, counts
from dcil.selection import largest_among
from dcil.weight import Layer


@dataclass(frozen=True, kw_only=True)
class SparseStart(Zeroed):
    """Exact-count random masks to begin with, by ``scope``; every update keeps the number of weights.

    until   part of ``steps`` after which the masks stay
    """

    scope: Scope = Uniform()
    until: float = 1.0

    granularities: ClassVar[tuple[type[Granularity], ...]] = (Weight,)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("until", 0 < self.until <= 1, "a part of the steps, above 0, at most 1")

    def sparsity_at(self, step: int) -> float:
        return self.sparsity

    def due(self, step: int) -> bool:
        return step % self.period == 0 and step < min(self.steps, round(self.until * self.steps))

    def start(self, now: StepContext) -> None:
        for layer, nnz, noise in zip(now.layers, self.start_counts(now.layers), self.noise(now), strict=True):
            everything = torch.ones_like(layer.mask)
            layer.mask.copy_(largest_among(everything, noise, nnz))
        zero_pruned(now)

    def start_counts(self, layers: Sequence[Layer]) -> list[int]:
        """Weights per layer at the start."""
        sizes = [layer.weight.numel() for layer in layers]
        shares = self.scope.sparsities(layers, self.sparsity) or [self.sparsity] * len(layers)
        pruned = counts(shares, sizes, int(self.sparsity * sum(sizes)))
        return [size - gone for size, gone in zip(sizes, pruned, strict=True)]

    def noise(self, now: StepContext) -> list[Tensor]:
        """Uniform random numbers for every weight; they depend on the seed and the step only, on every machine."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + now.step)
        return [torch.rand(layer.weight.shape, generator=generator).to(layer.weight.device) for layer in now.layers]


def nnz_of(layers: Sequence[Layer]) -> list[int]:
    """Weights in each layer now (waits for the device)."""
    found: list[int] = torch.stack([layer.mask.sum() for layer in layers]).tolist()
    return found
