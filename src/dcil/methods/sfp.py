"""SFP: soft filter pruning (He, Kang, Dong, Fu & Yang, IJCAI 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from dcil import views
from dcil.method import StepContext
from dcil.methods.filters_per_epoch import FiltersPerEpoch
from dcil.methods.zeroed import zero_pruned


@dataclass(frozen=True, kw_only=True)
class SFP(FiltersPerEpoch):
    """Once per epoch the filters with the smallest L2 norm are set to zero; then all of them train on, dense.

    gradual   let the sparsity grow along the schedule; the original prunes all of it from the first epoch

    There is no mask in the forward pass: a zeroed filter gets gradients and may grow back until the next time.
    Momentum and weight decay are left alone. Evaluation sees the filters of the last update as zero.
    Original: the same part of every layer, rounded down in each, shortcut convolutions left alone; before the first
    and after every epoch, the last included.
    Protocol: gradual, on the paper's prunable layers, exact over the network. The ranking stays within the layer, as
    the paper's tables say of SFP.
    """

    paths: ClassVar[Mapping[str, views.View]] = {"pruned": views.whole}

    def update(self, context: StepContext) -> None:
        super().update(context)
        zero_pruned(context, momentum=False)

    def shards(self) -> bool:
        return self.criterion.shards
