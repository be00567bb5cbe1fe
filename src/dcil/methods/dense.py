"""Dense training, the reference every other method is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from dcil import views
from dcil.method import Method
from dcil.schedule import Never, Schedule


@dataclass(frozen=True, kw_only=True)
class Dense(Method):
    """W <- W - lr * grad L(W): nothing is pruned."""

    sparsity: float = 0.0
    steps: int = 1
    schedule: Schedule = Never()

    paths: ClassVar[Mapping[str, views.View]] = {"pruned": views.whole}
    prunes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("sparsity", self.sparsity == 0, "0", "dense training prunes nothing")
