"""RigL: rigging the lottery (Evci, Gale, Menick, Castro & Elsen, ICML 2020)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dcil import views
from dcil.criteria import gradient_of
from dcil.method import StepContext
from dcil.methods.drop_and_grow import DropAndGrow, largest_weights
from dcil.scope import ERK, Scope
from dcil.selection import largest_among
from dcil.weight import PrunableWeight


@dataclass(frozen=True, kw_only=True)
class RigL(DropAndGrow):
    """Per layer: drop the smallest |w|, grow where the dense gradient is largest; a weight dropped and grown at
    once keeps its value and momentum, other new ones start at 0.

        dropped = f(t) * nnz,    f(t) = drop / 2 * (1 + cos(pi t / T_end))

    drop    alpha of the paper

    A layer with fewer empty places than it drops grows the rest where it has just dropped; a dense one stays as it is.
    Original: every 100 iterations until 75 % of the training, ERK, every layer sparse but the classifier's norms.
    Protocol: the same, on the paper's prunable layers. The original skips the optimizer step in which the masks
    change; here the user's loop has taken it already.
    """

    every: int = 100
    until: float = 0.75
    drop: float = 0.3
    scope: Scope = ERK()
    classifier: bool = True

    # The value is that of the sparse net, the gradient reaches every weight: that is the growth signal.
    paths: ClassVar[Mapping[str, views.View]] = {"pruned": views.straight_through}
    keeps_regrown: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("drop", 0 <= self.drop <= 1, ">= 0 and <= 1", "the fraction of weights to move at first")

    def drop_at(self, step: int) -> float:
        return self.drop / 2 * (1 + math.cos(math.pi * step / (self.until * self.steps)))

    def moved(self, context: StepContext) -> list[tuple[int, int]]:
        """(kept weights, weights to move) of each layer. The first never changes: no need to read it back."""
        fraction = self.drop_at(context.step)
        return [(nnz, int(fraction * nnz)) for nnz in self.start_counts(context.layers)]

    def survivors(self, context: StepContext) -> list[Tensor]:
        counts = zip(context.layers, self.moved(context), strict=True)
        return [largest_weights(layer, nnz - moved) for layer, (nnz, moved) in counts]

    def grown(self, context: StepContext, stay: Sequence[Tensor]) -> list[Tensor]:
        places = zip(context.layers, stay, self.moved(context), strict=True)
        return [largest_among(~kept, gradient_of(layer).abs(), moved) for layer, kept, (_, moved) in places]

    def reads(self, layer: PrunableWeight, context: StepContext) -> list[Tensor]:
        return [*super().reads(layer, context), gradient_of(layer)]

    def shards(self) -> bool:
        return self.criterion.shards
