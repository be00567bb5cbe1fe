"""FPGM: filter pruning via geometric median (He, Liu, Wang, Hu & Yang, CVPR 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dcil.criteria import State
from dcil.granularity import Filter, Granularity
from dcil.layer import Layer
from dcil.method import Moment
from dcil.methods.zeroed import Zeroed
from dcil.scope import Scope, Uniform


@dataclass(frozen=True, kw_only=True)
class FPGM(Zeroed):
    """Once per epoch, per layer, the filters nearest to all others go: the most replaceable ones.

        score(f) = sum over filters g of |f - g|

    gradual   let the sparsity grow along the schedule; the original prunes all of it from the first epoch

    Pruned filters get no gradient. The original lets leftover momentum revive them between epochs, against its own
    intention; here momentum is cleared. A zero filter lies near the median, so it is usually chosen again.
    Original: the same part of every layer, distance only (its rate_norm = 1). Protocol: gradual.
    """

    every: int = 0
    gradual: bool = False
    granularity: Granularity = Filter()
    scope: Scope = Uniform()

    granularities: ClassVar[tuple[type[Granularity], ...]] = (Filter,)

    def sparsity_at(self, step: int) -> float:
        return super().sparsity_at(step) if self.gradual else self.sparsity

    def due(self, step: int) -> bool:
        return super().due(step) or step == self.steps

    def start(self, now: Moment) -> None:
        self.update(now)

    def group_scores(self, layer: Layer, state: State) -> Tensor:
        rows = layer.rows(layer.weight.detach()).double()
        return torch.cdist(rows, rows).sum(1).float()
