"""DPF: dynamic pruning with feedback (Lin, Stich, Barba, Dmitriev & Jaggi, ICLR 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from dcil import views
from dcil.granularity import NM, Filter, Granularity, Weight
from dcil.method import Method
from dcil.schedule import Timeline


@dataclass(frozen=True, kw_only=True)
class DPF(Method):
    """One network computes with M * W; its gradient moves every weight, straight through the mask.

        W <- W - lr * grad_{M*W} L(M * W)                                         (Kim et al. 2022, Eq. 2)

    freeze   stop moving the masks once the target sparsity is reached. The DCIL authors' rerun moves them to the
             end (False); a public DPF implementation freezes them for the last quarter (True).

    The masks never move after ``steps``, so training on from there is the paper's fine-tuning with a fixed mask.
    """

    freeze: bool = False

    paths: ClassVar[Mapping[str, views.View]] = {"pruned": views.straight_through}
    granularities: ClassVar[tuple[type[Granularity], ...]] = (Weight, Filter, NM)

    @property
    def timeline(self) -> Timeline:
        return replace(super().timeline, last=self.target_step) if self.freeze else super().timeline
