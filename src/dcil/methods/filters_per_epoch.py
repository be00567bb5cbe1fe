"""Filters per epoch: the common part of SFP and FPGM (He et al.)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from dcil.granularity import Filter, Granularity
from dcil.method import Method, StepContext
from dcil.schedule import Constant, Cubic, Schedule, Timeline
from dcil.scope import Scope, Uniform, UniformFloor
from dcil.validation import new_default


@dataclass(frozen=True, kw_only=True)
class FiltersPerEpoch(Method):
    """Prune the same part of every layer's filters after each epoch.

    gradual   let the sparsity grow along the schedule; the originals prune all of it before the first epoch

    As in the originals each layer loses floor(sparsity * filters), 28.5 % of ResNet-32's when 30 % are asked for, and
    shortcut convolutions are left alone. ``scope=Uniform()`` makes the total exact.
    """

    every: int = 0
    gradual: bool = False
    granularity: Granularity = Filter()
    scope: Scope = new_default(UniformFloor(), before=Uniform())
    shortcuts: bool = new_default(False, before=True)
    schedule: Schedule = Constant()

    extra_steps: ClassVar[bool] = True
    granularities: ClassVar[tuple[type[Granularity], ...]] = (Filter,)

    @property
    def timeline(self) -> Timeline:
        return replace(super().timeline, extra=(self.steps,))

    @property
    def active_schedule(self) -> Schedule:
        return Cubic() if self.gradual else self.schedule

    def start(self, context: StepContext) -> None:
        self.update(context)

    def shards(self) -> bool:
        return self.criterion.shards
