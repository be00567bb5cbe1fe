"""A time budget: a deadline, and the progress callback that stops a run at it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dcil.runs.progress import Progress
from dcil.train.parallel import Stopped

MARGIN = 1.25  # an epoch may take longer than the one before, and its checkpoint takes time too
Clock = Callable[[], float]


@dataclass
class Budget:
    """A deadline on a clock; an epoch that would not end before it is not begun."""

    end: float = float("inf")
    clock: Clock = time.monotonic
    over: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def of(cls, seconds: float | None, clock: Clock = time.monotonic) -> Budget:
        return cls(clock() + seconds if seconds is not None else float("inf"), clock)

    def allows(self, seconds: float) -> bool:
        return not self.over.is_set() and self.clock() + seconds <= self.end

    @property
    def left(self) -> float:
        """The seconds until the deadline, which may be infinite."""
        return 0.0 if self.over.is_set() else max(0.0, self.end - self.clock())


def within_budget(show: Progress, budget: Budget) -> Progress:
    """Return a callback that shows progress and stops the run when there is no time for another epoch."""

    def progress(epoch: int, part: float, row: dict[str, Any] | None) -> None:
        if not budget.allows(0):  # also within an epoch that takes longer than estimated
            raise Stopped
        show(epoch, part, row)
        if row is not None and not budget.allows(MARGIN * row["seconds"]):
            raise Stopped

    return progress
