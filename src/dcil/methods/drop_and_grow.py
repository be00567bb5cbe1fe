"""Drop and grow: a random sparse network from the first step, whose connections are exchanged during training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from dcil.granularity import Granularity, Weight
from dcil.method import StepContext
from dcil.methods.zeroed import Zeroed, zero_pruned
from dcil.schedule import Constant, Schedule, Timeline
from dcil.scope import Scope, Uniform
from dcil.selection import largest_among
from dcil.sharding import count_true, like
from dcil.weight import PrunableWeight


@dataclass(frozen=True, kw_only=True)
class DropAndGrow(Zeroed):
    """Begin with exact-count random masks, by ``scope``; every update drops some weights and grows as many.

    until   part of ``steps`` after which the masks stay

    A method says which weights stay (``survivors``) and which are added (``grown``); new weights start at 0.
    """

    schedule: Schedule = Constant()
    scope: Scope = Uniform()
    until: float = 1.0

    granularities: ClassVar[tuple[type[Granularity], ...]] = (Weight,)
    draws_masks: ClassVar[bool] = True
    #: Whether the optimizer's state of a dropped weight is cleared.
    clears_momentum: ClassVar[bool] = True
    #: Whether a weight that is dropped and grown by the same update keeps its value and momentum.
    keeps_regrown: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("until", 0 < self.until <= 1, "> 0 and <= 1", "a part of the steps")
        self.require("initial_sparsity", self.initial_sparsity == 0, "0", "the masks are as sparse from the start")
        self.require("min_kept", self.min_kept == 0, "0", "the scope decides how many a layer has")

    @property
    def timeline(self) -> Timeline:
        return replace(super().timeline, extra=(), last=min(self.steps, round(self.until * self.steps)) - 1)

    def start(self, context: StepContext) -> None:
        for layer, nnz, noise in zip(
            context.layers, self.start_counts(context.layers), self.noise(context), strict=True
        ):
            layer.mask.copy_(largest_among(torch.ones_like(layer.mask), noise, nnz))
        zero_pruned(context)

    def survivors(self, context: StepContext) -> list[Tensor]:
        """Each layer's mask of the weights that are not dropped."""
        raise NotImplementedError("abstract: a drop-and-grow method defines survivors")

    def grown(self, context: StepContext, stay: Sequence[Tensor]) -> list[Tensor]:
        """Each layer's mask of the weights that are added to ``stay``, as many in all as were dropped."""
        raise NotImplementedError("abstract: a drop-and-grow method defines grown")

    def update(self, context: StepContext) -> None:
        stay = self.survivors(context)
        grown = self.grown(context, stay)
        for layer, old, new in zip(context.layers, stay, grown, strict=True):
            layer.mask.copy_(old | new if self.keeps_regrown else old)
        zero_pruned(context, momentum=self.clears_momentum)
        for layer, new in zip(context.layers, grown, strict=True):
            layer.mask.logical_or_(new)

    def start_counts(self, layers: Sequence[PrunableWeight]) -> list[int]:
        """Weights per layer at the start."""
        sizes = [layer.weight.numel() for layer in layers]
        shares = self.scope.sparsities(layers, self.sparsity) or [self.sparsity] * len(layers)
        pruned = self.scope.counts(shares, sizes, int(self.sparsity * sum(sizes)), sizes)
        return [size - gone for size, gone in zip(sizes, pruned, strict=True)]

    def noise(self, context: StepContext) -> list[Tensor]:
        """Uniform random numbers for every weight; they depend on the seed and the step only, on every machine."""
        seed = self.seed * 1_000_003 + context.step
        generator = torch.Generator().manual_seed(seed if seed in range(-(2**63), 2**64) else seed % 2**64)
        weights = [layer.weight for layer in context.layers]
        return [like(torch.rand(w.shape, generator=generator).to(w.device), w) for w in weights]


def largest_weights(layer: PrunableWeight, count: int) -> Tensor:
    """The ``count`` largest of the layer's kept weights, as a mask."""
    return largest_among(layer.mask, layer.magnitude, count)


def count_kept(masks: Sequence[Tensor]) -> list[int]:
    """Kept weights of each mask (waits for the device)."""
    found: list[int] = count_true(masks).tolist()
    return found
