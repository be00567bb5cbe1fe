"""One-shot: train, prune by magnitude, fine-tune (Han, Pool, Tran & Dally, NeurIPS 2015)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

from dcil.method import StepContext
from dcil.methods.zeroed import Zeroed
from dcil.optimizer_state import reset_state
from dcil.schedule import AtSteps, Phase, Schedule, Timeline


@dataclass(frozen=True, kw_only=True)
class OneShot(Zeroed):
    """Dense until ``ramp`` of the steps, then pruned once, or in ``rounds``, and trained on with these masks.

        after round r of R:   density = (1 - sparsity)^(r / R)

    rounds    prune and fine-tune this often, in equal parts of the steps that are left
    fresh     start the fine-tuning with an empty optimizer
    constant  fine-tune at a constant learning rate

    Original (Liu et al. 2019's code): 160 epochs, one global ranking, 40 epochs at 0.001 with a fresh optimizer. It
    keeps what is above the element at floor(s * n), so one weight more goes than the floor(s * n) that go here.
    Protocol: pruned at the target epoch, with the learning-rate schedule of every other method.
    """

    ramp: float = 0.8
    rounds: int = 1
    fresh: bool = True
    constant: bool = True
    schedule: Schedule = AtSteps()

    extra_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("rounds", 1 <= self.rounds <= 1000, "from 1 to 1000")
        known = self.rounds % 2 == 1 or not self.schedule.alternates
        self.require("rounds", known, "odd with a schedule that alternates", "an even number ends dense")

    @property
    def prunings(self) -> list[int]:
        """The steps after which weights are pruned."""
        left = self.steps - self.target_step
        return [self.target_step + left * r // self.rounds for r in range(self.rounds)]

    @property
    def timeline(self) -> Timeline:
        return replace(super().timeline, extra=tuple(self.prunings))

    def update(self, context: StepContext) -> None:
        super().update(context)
        if self.fresh:
            reset_state(context.optimizer, context.model)

    def shards(self) -> bool:
        return self.criterion.shards

    def phases(self) -> tuple[Phase, ...]:
        ends = [*self.prunings, self.steps]
        first = Phase("train", ends[0])
        tuning = [
            Phase("fine-tune", end - begin, None if self.constant else begin)
            for begin, end in itertools.pairwise(ends)
            if end > begin
        ]
        extra = [Phase("fine-tune", self.finetune, None)] if self.finetune else []
        return (first, *tuning, *extra)
