"""GMP: gradual magnitude pruning, "Incremental" in the paper's tables (Zhu & Gupta, 2017)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from dcil.granularity import NM, Filter, Granularity, Weight
from dcil.methods.zeroed import Zeroed
from dcil.schedule import Timeline
from dcil.scope import Scope, Uniform


@dataclass(frozen=True, kw_only=True)
class GMP(Zeroed):
    """The smallest weights go as the sparsity grows, and never come back; the masks stay once it is reached.

        s(t) = s_f + (s_i - s_f) (1 - (t - t_0) / (n dt))^3

    Original: every 100 iterations, the sparsity growing with every step (from Python: ``smooth``, where ``epoch_steps``
    is given), the same in every layer, stem dense, classifier sparse; weights are written as w * m (tfmot), and here
    their momentum is cleared too, so that they stay zero. Where the target step is no multiple of 100 it has an update
    of its own: the original misses the target then.
    Protocol: every 16 iterations, growing once per epoch, one ranking across the paper's prunable layers.
    """

    every: int = 100
    scope: Scope = Uniform()
    stem: bool = False
    classifier: bool = True

    extra_steps: ClassVar[bool] = True
    granularities: ClassVar[tuple[type[Granularity], ...]] = (Weight, Filter, NM)

    @property
    def timeline(self) -> Timeline:
        return replace(super().timeline, last=self.target_step, extra=(self.target_step,))
