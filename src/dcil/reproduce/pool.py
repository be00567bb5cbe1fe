"""Many runs, several at once, within a time budget; the same command resumes what was stopped."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console

from dcil.reproduce.session import CellRun, RunOptions, resume_run
from dcil.runs.progress import progress_lines
from dcil.train.parallel import Stopped, run_jobs

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


@dataclass
class Pool:
    """Trains runs in parallel until they are done or the budget is spent."""

    options: RunOptions
    budget: Budget
    console: Console
    tidy: bool = False
    snapshots: Callable[[CellRun], Sequence[int]] = lambda run: ()

    def run(self, runs: Sequence[CellRun], epoch_seconds: Callable[[CellRun], float]) -> dict[str, str]:
        """Train the runs in their order; return label -> reason of those that failed."""
        jobs = {run.label: partial(self.run_one, run, epoch_seconds(run)) for run in runs}
        return run_jobs(jobs, self.options.at_once, self.options.device, self.budget.over, self.console)

    def run_one(self, run: CellRun, epoch_seconds: float) -> None:
        if not self.budget.allows(2 * epoch_seconds):  # the first epoch of a session takes longer
            return
        with run.locked():
            resume_run(run, self.options, self.progress(run), self.snapshots(run))
            if self.tidy:
                remove_working_files(run)

    def progress(self, run: CellRun) -> Callable[[int, float, dict[str, Any] | None], None]:
        """Return the callback that shows progress and stops the run when there is no time for another epoch."""
        show = progress_lines(self.console, run.label, run.config().total_epochs)

        def progress(epoch: int, part: float, row: dict[str, Any] | None) -> None:
            if not self.budget.allows(0):  # also within an epoch that takes longer than estimated
                raise Stopped
            show(epoch, part, row)
            if row is not None and not self.budget.allows(MARGIN * row["seconds"]):
                raise Stopped

        return progress


def remove_working_files(run: CellRun) -> None:
    """Remove the working folder of a recorded run, except the snapshots that `iterations` starts from."""
    kept = list(run.folder.path.glob("at*.safetensors"))
    if not kept:
        if run.folder.path.exists():  # else another process has done so
            shutil.rmtree(run.folder.path)
        return
    for file in run.folder.path.iterdir():
        if file not in kept and file.name != "config.json":
            file.unlink()
