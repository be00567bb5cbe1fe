"""Many runs, several at once, within a time budget. Whatever is stopped goes on with the same command."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console

from dcil.reproduce.session import Run, RunOptions, resume_run
from dcil.runs.progress import progress_lines
from dcil.train.parallel import Stopped, run_jobs

MARGIN = 1.25  # an epoch may take longer than the one before, and its checkpoint takes time too
Clock = Callable[[], float]


@dataclass
class Budget:
    """Time until a moment on a clock; an epoch that would not end before it is not begun."""

    end: float = float("inf")
    clock: Clock = time.monotonic
    over: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def of(cls, seconds: float | None, clock: Clock = time.monotonic) -> Budget:
        return cls(clock() + seconds if seconds is not None else float("inf"), clock)

    def allows(self, seconds: float) -> bool:
        return not self.over.is_set() and self.clock() + seconds <= self.end


@dataclass
class Pool:
    place: RunOptions
    budget: Budget
    console: Console
    tidy: bool = False
    snapshots: Callable[[Run], Sequence[int]] = lambda run: ()

    def run(self, runs: Sequence[Run], per_epoch: Callable[[Run], float]) -> dict[str, str]:
        """Train the runs in their order; label -> why, of those that failed."""
        jobs = {run.label: partial(self.one, run, per_epoch(run)) for run in runs}
        return run_jobs(jobs, self.place.at_once, self.place.device, self.budget.over, self.console)

    def one(self, run: Run, epoch_seconds: float) -> None:
        if not self.budget.allows(2 * epoch_seconds):  # the first epoch of a session takes longer
            return
        resume_run(run, self.place, self.watching(run), self.snapshots(run))
        if self.tidy:
            clear(run)

    def watching(self, run: Run) -> Callable[[int, float, dict[str, Any] | None], None]:
        """The progress callback: shows, and stops the run at the end of an epoch when there is no time for another."""
        show = progress_lines(self.console, run.label, run.config().total_epochs)

        def progress(epoch: int, part: float, row: dict[str, Any] | None) -> None:
            if not self.budget.allows(0):  # also in the middle of an epoch that takes longer than was thought
                raise Stopped
            show(epoch, part, row)
            if row is not None and not self.budget.allows(MARGIN * row["seconds"]):
                raise Stopped

        return progress


def clear(run: Run) -> None:
    """Remove the working folder of a recorded run, except what the analysis of iterations starts from."""
    kept = list(run.folder.path.glob("at*.safetensors"))
    if not kept:
        shutil.rmtree(run.folder.path)
        return
    for file in run.folder.path.iterdir():
        if file not in kept and file.name != "config.json":
            file.unlink()
