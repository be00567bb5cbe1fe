"""Many runs, several at once, within a time budget; the same command resumes what was stopped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from dcil.reproduce.session import CellRun, RunOptions, resume_run
from dcil.runs.progress import progress_lines
from dcil.train.budget import Budget, within_budget
from dcil.train.parallel import run_jobs


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
            show = progress_lines(self.console, run.label, run.config().total_epochs)
            resume_run(run, self.options, within_budget(show, self.budget), self.snapshots(run))
            if self.tidy:
                remove_working_files(run)


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
