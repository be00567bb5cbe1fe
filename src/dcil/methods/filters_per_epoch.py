"""What He et al.'s filter methods share: the same part of every layer, once per epoch, the last one included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dcil.granularity import Filter, Granularity
from dcil.method import Method, StepContext
from dcil.scope import Scope, Uniform


@dataclass(frozen=True, kw_only=True)
class FiltersPerEpoch(Method):
    """gradual   let the sparsity grow along the schedule; the originals prune all of it before the first epoch"""

    every: int = 0
    gradual: bool = False
    granularity: Granularity = Filter()
    scope: Scope = Uniform()

    granularities: ClassVar[tuple[type[Granularity], ...]] = (Filter,)

    def sparsity_at(self, step: int) -> float:
        return super().sparsity_at(step) if self.gradual else self.sparsity

    def due(self, step: int) -> bool:
        return super().due(step) or step == self.steps

    def start(self, now: StepContext) -> None:
        self.update(now)
