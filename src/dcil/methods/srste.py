"""SR-STE: sparse-refined straight-through estimation (Zhou, Ma, Zhu, Liu, Zhang, Yuan, Sun & Li, ICLR 2021)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dcil import views
from dcil.criteria import Magnitude, State
from dcil.granularity import NM, Granularity, Weight
from dcil.method import Method, StepContext
from dcil.schedule import Constant, Schedule
from dcil.weight import PrunableWeight


@dataclass(frozen=True, kw_only=True)
class SRSTE(Method):
    """The gradient of M * w reaches every weight, straight through, and pruned weights decay more than others.

        dL/dw = dL/d(M w) + decay (1 - M) w

    decay   lambda of the paper: of pruned weights alone, beside the optimizer's weight decay

    Original (github.com/NM-sparsity/NM-sparsity): N of M (``granularity=NM(2, 4)``), chosen anew in every forward pass
    from the first one on; all convolutions, the classifier dense. It also groups the three channels that the stem reads
    with those of the next position; here a layer whose inputs do not divide by M stays dense. Single weights follow the
    same rule without the pattern.
    Protocol: the sparsity grows once per epoch, on the paper's prunable layers; masks after every step.
    On the same tensors, masks, values and gradients equal the original's bit for bit (where no two weights tie).
    """

    every: int = 1
    decay: float = 2e-4
    schedule: Schedule = Constant()

    paths: ClassVar[Mapping[str, views.View]] = {"pruned": views.straight_through}
    granularities: ClassVar[tuple[type[Granularity], ...]] = (Weight, NM)
    adds_gradient: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("decay", 0 <= self.decay <= 1, ">= 0 and <= 1", "the paper: 2e-4")

    def start(self, context: StepContext) -> None:
        if isinstance(self.criterion, Magnitude):  # others rank gradients, of which there are none yet
            self.update(context)

    def added_gradient(self, layer: PrunableWeight, state: State) -> Tensor:
        return self.decay * layer.weight.detach() * ~layer.mask

    def loss_key(self, step: int) -> Hashable:
        return ()
