"""AC/DC: alternating compressed and decompressed training (Peste, Iofinova, Vladu & Alistarh, NeurIPS 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from dcil.granularity import NM, Granularity, Weight
from dcil.method import StepContext
from dcil.methods.zeroed import Zeroed
from dcil.optimizer_state import reset_state
from dcil.schedule import Alternating, Schedule, Timeline


@dataclass(frozen=True, kw_only=True)
class ACDC(Zeroed):
    """Dense at first; then pruned by magnitude and dense again in turn, in phases of equal length; pruned in the end.

    In a compressed phase the masks stay and pruned weights are zero; a decompressed one lets them train from there,
    with an empty momentum.

    begin    part of ``steps`` before the first pruning
    rounds   decompressed phases
    last     part of ``steps`` of the last compressed phase

    ``ramp`` has no effect: each compressed phase has the final sparsity.

    Original (github.com/IST-DASLab/ACDC), on CIFAR-10: of 200 epochs 10 dense, 4 times 20 compressed and 20 dense, 30
    compressed; one ranking of all convolutions and the classifier; momentum is reset where dense phases begin and
    nowhere else. (ImageNet: phases of 5 epochs of 100, the last dense one of 10.)
    Protocol: the same parts of the training, on the paper's prunable layers.
    On the same tensors its masks equal the original's but for the one weight more that it prunes.
    """

    begin: float = 0.05
    rounds: int = 4
    last: float = 0.15
    schedule: Schedule = Alternating()
    classifier: bool = True

    extra_steps: ClassVar[bool] = True
    grows: ClassVar[bool] = False
    granularities: ClassVar[tuple[type[Granularity], ...]] = (Weight, NM)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("initial_sparsity", self.initial_sparsity == 0, "0", "the first phase is dense")
        self.require("rounds", 0 <= self.rounds <= 1000, "from 0 to 1000")
        most = 1 - self.begin
        self.require("last", 0 < self.last <= most, f"> 0 and <= 1 - begin, {most:g}", "a part of the steps")

    @property
    def timeline(self) -> Timeline:
        """The steps after which a phase ends, the last of them a dense one."""
        length = (1 - self.begin - self.last) / max(1, 2 * self.rounds)
        parts = [self.begin + length * phase for phase in range(2 * self.rounds)] + [1 - self.last]
        ends = [min(max(1, round(part * self.steps)), self.steps) for part in parts]
        return replace(super().timeline, extra=tuple(ends))

    def update(self, context: StepContext) -> None:
        super().update(context)
        if not self.sparsity_at(context.step):  # a dense phase begins
            reset_state(context.optimizer, context.model)

    def shards(self) -> bool:
        return self.criterion.shards
