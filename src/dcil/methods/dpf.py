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
             end (False); a public third-party implementation freezes them for the last quarter (True). Its timing is
             another one: its sparsity grows per step (``smooth``), its first update comes after step 15, and its last
             is the last multiple of 16 before the target; here the target step itself has the last update.

    The masks never move after ``steps``, so training on from there is the paper's fine-tuning with a fixed mask.
    """

    freeze: bool = False

    paths: ClassVar[Mapping[str, views.View]] = {"pruned": views.straight_through}
    granularities: ClassVar[tuple[type[Granularity], ...]] = (Weight, Filter, NM)

    @property
    def timeline(self) -> Timeline:
        if not self.freeze:
            return super().timeline
        return replace(super().timeline, last=self.target_step, extra=(self.target_step,))
