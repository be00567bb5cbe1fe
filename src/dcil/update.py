"""Update: what a mask update changed, who computes it and who is told of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dcil.method import StepContext


@dataclass(frozen=True)
class Update:
    """A mask update: after which step, and how many weights it (revived, dropped), left on the device."""

    step: int
    changes: Tensor


class StepHooks(Protocol):
    """What ``SparseNet.step`` calls: the method itself, or an engine that has recorded the same computation."""

    def after_step(self, context: StepContext) -> None: ...

    def update_masks(self, context: StepContext) -> Tensor: ...


class MaskObserver(Protocol):
    """Called before and after every mask update; see ``SparseNet.add_observer``."""

    def before_update(self, step: int) -> None: ...

    def after_update(self, update: Update) -> None: ...
