"""RigL: rigging the lottery (Evci, Gale, Menick, Castro & Elsen, ICML 2020)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from dcil import views
from dcil.criteria import gradient_of
from dcil.method import StepContext
from dcil.methods.sparse_start import SparseStart
from dcil.methods.zeroed import zero_pruned
from dcil.scope import ERK, Scope
from dcil.selection import largest_among


@dataclass(frozen=True, kw_only=True)
class RigL(SparseStart):
    """Per layer: drop the smallest |w|, grow where the dense gradient is largest; a weight dropped and grown at
    once keeps its value and momentum, other new ones start at 0.

        dropped = f(t) * nnz,    f(t) = drop / 2 * (1 + cos(pi t / T_end))

    drop    alpha of the paper

    Original: every 100 iterations until 75 % of the training, ERK, every layer sparse but the classifier's norms.
    Protocol: the same, on the paper's prunable layers. The original skips the optimizer step in which the masks
    move; here the user's loop has taken it already.
    """

    every: int = 100
    until: float = 0.75
    drop: float = 0.3
    scope: Scope = ERK()
    classifier: bool = True

    # The value is that of the sparse net, the gradient reaches every weight: that is the growth signal.
    paths: ClassVar[Mapping[str, views.View]] = {"pruned": views.straight_through}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("drop", 0 <= self.drop <= 1, "the fraction of weights to move at first, from 0 to 1")

    def drop_at(self, step: int) -> float:
        return self.drop / 2 * (1 + math.cos(math.pi * step / (self.until * self.steps)))

    def update(self, now: StepContext) -> None:
        # The number of weights in a layer never changes, so it need not be read from the device.
        for layer, nnz in zip(now.layers, self.start_counts(now.layers), strict=True):
            moved = min(int(self.drop_at(now.step) * nnz), layer.weight.numel() - nnz)
            stay = largest_among(layer.mask, layer.weight.detach().abs(), nnz - moved)
            grown = largest_among(~stay, gradient_of(layer).abs(), moved)
            layer.mask.copy_(stay | grown)
        zero_pruned(now)
