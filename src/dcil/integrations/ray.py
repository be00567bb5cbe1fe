"""Ray: every run of a grid is a task that trains one run folder on storage that all machines share.

Run folders stay the truth. A task is given text and returns text; what was lost with a worker or a machine is taken up
elsewhere from its last checkpoint, and the same command continues whatever was stopped, with Ray or without.
"""

from __future__ import annotations

import os
import platform
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from dcil.errors import UserError, missing_extra
from dcil.integrations.ray_cluster import Share, capacity
from dcil.integrations.ray_worker import BROKEN, UNFIT, Terms, Work, terms_text, work
from dcil.runs.file_lock import exclusive, is_held
from dcil.runs.folder import RunFolder
from dcil.runs.progress import Board, Progress
from dcil.train.budget import Budget

try:
    import ray
    from ray.exceptions import RayError, RayTaskError, TaskCancelledError, WorkerCrashedError
except ImportError as error:
    raise missing_extra("ray", "ray") from error

POLL = 0.5  # seconds between two looks at the run folders
LOSSES = 3  # times that a run may lose its worker without a new checkpoint
PATIENCE = 180.0  # seconds: file servers keep the locks of a machine that is gone for about 90
GRACE = 60.0  # seconds that tasks have for the step they are in when they are stopped
WITNESS = ".ray-{host}-{process}.lock"


@dataclass(frozen=True)
class Job:
    """A run: ``work`` trains what ``text`` describes, ``epochs`` in all, in ``folder``."""

    name: str
    folder: RunFolder
    epochs: int
    work: Work
    text: str


def run_on_ray(jobs: Sequence[Job], out: Path, share: Share, budget: Budget, console: Console) -> dict[str, str]:
    """Train all runs below ``out`` in their order; return the reason for each that failed, by name."""
    with witness(out) as file, Board(console, len(jobs)) as board:
        deadline = None if budget.left == float("inf") else time.time() + budget.left
        terms = terms_text(Terms(str(file), share.cpus, deadline))
        grid = Grid(deque(jobs), share, budget, console, board, terms)
        try:
            return grid.run()
        except KeyboardInterrupt:
            console.print("[bold]stopping[/]; to continue: the same command again")
            raise
        finally:
            grid.stop()


@contextmanager
def witness(out: Path) -> Iterator[Path]:
    """Hold a lock that every worker must see as held: then it sees those of the run folders too."""
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    for left in out.glob(WITNESS.format(host="*", process="*")):
        if not is_held(left):
            left.unlink(missing_ok=True)
    file = out / WITNESS.format(host=platform.node(), process=os.getpid())
    with exclusive(file, f"one process at a time may hold {file}"):
        yield file


@dataclass
class Grid:
    """The runs that wait, those that Ray has, and how they ended."""

    waiting: deque[Job]
    share: Share
    budget: Budget
    console: Console
    board: Board
    terms: str
    tasks: dict[Any, Job] = field(default_factory=dict)
    tails: dict[str, Tail] = field(default_factory=dict)
    losses: dict[str, Losses] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    looked: float = 0.0
    room: int = 0
    broken: int = 0  # worker processes whose accelerator is: each ends when it gets its next run

    def run(self) -> dict[str, str]:
        # No retries of Ray's own: whether a run gets further is seen in its folder. No new process for every run.
        options = {"num_cpus": self.share.cpus, "num_gpus": self.share.gpus, "max_retries": 0, "max_calls": 0}
        train = ray.remote(**options)(work)
        while (self.waiting or self.tasks) and self.budget.allows(0):
            if time.monotonic() - self.looked >= POLL:
                self.look()
            while self.waiting and len(self.tasks) < self.room:
                job = self.waiting.popleft()
                self.tasks[train.remote(job.work, job.text, self.terms, PATIENCE)] = job
            done, _ = ray.wait(list(self.tasks), timeout=POLL)
            for ref in done:
                self.collect(ref)
        return self.failures

    def look(self) -> None:
        """Show what the run folders have, and count what fits into the cluster: nodes come and go."""
        for job in self.tasks.values():
            self.tail(job).show()
        # Beyond what fits, so that no worker waits for this process and autoscalers see that there is more to do.
        ahead = 2 * capacity(self.share) + 8
        self.room = ahead if self.share.at_most is None else min(ahead, self.share.at_most)
        self.looked = time.monotonic()

    def tail(self, job: Job) -> Tail:
        return self.tails.setdefault(job.name, Tail(job, self.board))

    def collect(self, ref: Any) -> None:
        """Take the end of a task: the run's, its failure, or the loss of its worker."""
        job = self.tasks.pop(ref)
        try:
            kind, failure = ray.get(ref)
            if kind == UNFIT:  # it would take one run after the other
                raise UserError(failure)
            self.broken += kind == BROKEN
        except TaskCancelledError:
            return
        except RayTaskError as error:
            cause = error.cause or error
            failure = (str(cause).strip().splitlines() or [type(cause).__name__])[-1]
        except RayError as error:
            if self.broken and isinstance(error, WorkerCrashedError):
                self.broken -= 1
                self.waiting.appendleft(job)
                return
            failure = self.losses.setdefault(job.name, Losses(job)).another(error)
            if not failure:
                line = f"{job.name}: its worker is lost ({named(error)}); another one takes it up"
                self.console.print(line, markup=False, highlight=False, soft_wrap=True)
                self.waiting.appendleft(job)
                return
        if failure:
            self.failures[job.name] = failure
        self.tails.pop(job.name, Tail(job, self.board)).end()

    def stop(self) -> None:
        """Stop all tasks, each after the step that it is in, and wait until they have ended."""
        self.waiting.clear()
        for ref in self.tasks:
            with suppress(RayError):
                ray.cancel(ref)
        if self.tasks:
            _, left = ray.wait(list(self.tasks), num_returns=len(self.tasks), timeout=GRACE)
            for ref in left:
                with suppress(RayError):
                    ray.cancel(ref, force=True)
        for tail in self.tails.values():
            tail.show()


@dataclass
class Losses:
    """Counts how often a run has lost its worker since its last checkpoint."""

    job: Job
    mark: bytes = b""
    count: int = 0

    def another(self, error: RayError) -> str:
        """Count a loss; return why the run is given up, an empty text if it is not."""
        file = self.job.folder.path / "checkpoint.json"
        mark = file.read_bytes() if file.exists() else b""
        self.count = self.count + 1 if mark == self.mark else 1
        self.mark = mark
        if self.count < LOSSES:
            return ""
        return f"its worker was lost {self.count} times without a checkpoint in between, last by {named(error)}"


def named(error: RayError) -> str:
    """Name the kind of an error in words: worker crashed, node died, out of memory."""
    kind = type(error).__name__.removesuffix("Error")
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in kind).strip()


@dataclass
class Tail:
    """Shows what is added to the metrics of a run."""

    job: Job
    board: Board
    size: int = 0
    epochs: int = 0
    progress: Progress | None = None

    def show(self) -> None:
        """Show the epochs that are new; what cannot be read is being written."""
        try:
            size = (self.job.folder.path / "metrics.jsonl").stat().st_size
            if size == self.size:
                return
            rows = self.job.folder.metrics()
        except (OSError, UserError):
            return
        self.progress = self.progress or self.board.begin(self.job.name, self.job.epochs)
        for row in rows[self.epochs :]:
            self.progress(row["epoch"], 0.0, row)
        self.size, self.epochs = size, len(rows)

    def end(self) -> None:
        self.show()
        self.board.end(self.job.name)
