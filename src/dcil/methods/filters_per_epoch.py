"""Filters per epoch: the common part of SFP and FPGM (He et al.)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from dcil.granularity import Filter, Granularity
from dcil.method import Method, StepContext
from dcil.schedule import Constant, Cubic, Schedule, Timeline
from dcil.scope import Scope, Uniform


@dataclass(frozen=True, kw_only=True)
class FiltersPerEpoch(Method):
    """Prune the same part of every layer's filters after each epoch.

    gradual   let the sparsity grow along the schedule; the originals prune all of it before the first epoch
    """

    every: int = 0
    gradual: bool = False
    granularity: Granularity = Filter()
    scope: Scope = Uniform()
    schedule: Schedule = Constant()

    granularities: ClassVar[tuple[type[Granularity], ...]] = (Filter,)

    @property
    def timeline(self) -> Timeline:
        return replace(super().timeline, extra=(self.target_step, self.steps))

    @property
    def active_schedule(self) -> Schedule:
        return Cubic() if self.gradual else self.schedule

    def start(self, context: StepContext) -> None:
        self.update(context)

    def shards(self) -> bool:
        return self.criterion.shards
