"""GraNet: gradual pruning with zero-cost neuroregeneration (Liu, Chen, Chen, Atashgahi et al., NeurIPS 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dcil import views
from dcil.criteria import State, gradient_of
from dcil.granularity import Granularity, Weight
from dcil.method import StepContext
from dcil.methods.drop_and_grow import count_kept, largest_weights
from dcil.methods.zeroed import Zeroed, zero_pruned
from dcil.selection import largest_among
from dcil.weight import PrunableWeight


@dataclass(frozen=True, kw_only=True)
class GraNet(Zeroed):
    """Gradual magnitude pruning across layers; each time every layer then drops some more of its smallest weights and
    grows as many where the dense gradient is largest. New weights start at 0.

        dropped = ceil(f(t) * nnz),    f(t) = end + (drop - end) / 2 * (1 + cos(pi t / T))

    drop       the part of a layer's weights that is exchanged at first
    drop_end   the part at last

    Original (github.com/VITA-Group/GraNet): every 1000 iterations on CIFAR (4000 on ImageNet, the code's default is
    100), to the end of the training; the sparsity grows with every step until epoch 110 of 160; all layers, the
    classifier too. Its start from a random network of half the weights is left out. Its last pruning is one update
    before the target, which it misses by 1 / (number of updates)^3; it keeps one weight less than asked for.
    Protocol: once per epoch, when the paper's sparsity grows, on the paper's prunable layers.
    On the same tensors, masks equal the original's where its count is given.
    """

    every: int = 100
    ramp: float = 110 / 160
    drop: float = 0.5
    drop_end: float = 0.005
    classifier: bool = True

    # The value is that of the sparse net, the gradient reaches every weight: that is the growth signal.
    paths: ClassVar[Mapping[str, views.View]] = {"pruned": views.straight_through}
    granularities: ClassVar[tuple[type[Granularity], ...]] = (Weight,)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("drop", "drop_end"):
            self.require(name, 0 <= getattr(self, name) <= 1, ">= 0 and <= 1", "the fraction of weights to exchange")
        self.require("min_kept", self.min_kept == 0, "0", "the exchange keeps each layer's count as pruning left it")

    def drop_at(self, step: int) -> float:
        return self.drop_end + (self.drop - self.drop_end) / 2 * (1 + math.cos(math.pi * step / self.steps))

    def group_scores(self, layer: PrunableWeight, state: State) -> Tensor:
        """Pruned weights come last: some that are kept may be 0, too, having just been grown."""
        scores = torch.where(layer.mask, self.criterion.score(layer, state), -1.0)
        return self.granularity.groups(layer, scores)

    def update(self, context: StepContext) -> None:
        super().update(context)
        fraction = self.drop_at(context.step)
        for layer, nnz in zip(context.layers, count_kept([layer.mask for layer in context.layers]), strict=True):
            moved = math.ceil(fraction * nnz)
            stay = largest_weights(layer, nnz - moved)
            layer.mask.copy_(stay | largest_among(~stay, gradient_of(layer).abs(), moved))
        zero_pruned(context)

    def reads(self, layer: PrunableWeight, context: StepContext) -> list[Tensor]:
        return [*super().reads(layer, context), gradient_of(layer)]

    def shards(self) -> bool:
        return self.criterion.shards
