"""Train a run in its folder: from its checkpoint, epoch by epoch, to the model and the summary."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dcil import data
from dcil.data import Loaded, TrainingData
from dcil.engine import PROCESS_LOCK, EngineSettings
from dcil.engine.process_group import SINGLE_PROCESS, ProcessGroup
from dcil.errors import UserError
from dcil.runs.atomic import CannotWrite
from dcil.runs.folder import Checkpoints, ReadOnlyRunFolder, RunFolder
from dcil.runs.position import START, Position
from dcil.runs.progress import Progress
from dcil.train.building import describe_data
from dcil.train.config import Config, to_json
from dcil.train.finish import finish
from dcil.train.out_of_memory import naming_what_to_reduce
from dcil.train.restore import check_data, config_of
from dcil.train.trainer import Trainer

NO_END = sys.maxsize
SAVE_EVERY = 5.0  # least seconds between checkpoints at the ends of epochs


class RunCallback:
    """Callbacks of a run; the base class does nothing."""

    def __init__(self, trainer: Trainer) -> None: ...

    def restore(self, folder: Path, position: Position) -> None:
        """Called before training starts or resumes at ``position``."""

    def begin(self, folder: Path, epoch: int) -> None:
        """Called before epoch number ``epoch`` (from 0), or before it goes on."""

    def evaluates(self, epoch: int) -> bool:
        """Return whether the accuracy is measured at the end of epoch number ``epoch`` (from 0)."""
        return True

    def needs_checkpoint(self, epoch: int) -> bool:
        """Return whether a checkpoint must be written after ``epoch`` epochs."""
        return False

    def save(self, folder: Path, epoch: int) -> None:
        """Called before the checkpoint at the end of ``epoch`` is written."""

    def saved(self, folder: Path, epoch: int) -> None:
        """Called after the checkpoint at the end of ``epoch`` is written."""


def train(
    config: Config,
    folder: RunFolder,
    data_dir: Path,
    device: torch.device,
    progress: Progress = lambda epoch, part, row: None,
    settings: EngineSettings | None = None,
    load: Callable[[str, Path], Loaded] = data.load,
    check: Callable[[Loaded], Loaded] = lambda loaded: loaded,
    group: ProcessGroup = SINGLE_PROCESS,
    callback: Callable[[Trainer], RunCallback] = RunCallback,
    until: int = NO_END,
    resume: bool = True,
    checkpoint_minutes: float = 0.0,
) -> dict[str, Any]:
    """Train ``config`` in ``folder``, from its checkpoint if there is one, to the end or through epoch ``until``.

    Checkpoints are written at the ends of epochs, and within an epoch when the last one is ``checkpoint_minutes`` old
    (0: not within epochs). When they are written changes nothing in the result.
    Return the summary, an empty one if there is more to train. An exception that ``progress`` raises at the end of an
    epoch stops the run after its checkpoint. In a process group every rank calls this; only rank 0 writes, and the
    others return an empty summary. Without ``resume`` the folder must not hold a run, also none that was begun after
    the caller looked.
    """
    if (done := completed(folder, config, resume)) is not None:
        return done
    folder = folder if group.is_rank_zero else ReadOnlyRunFolder(folder.path)
    advice = f"--resume --low-memory, or fewer runs at once, continues {folder.path} from its last checkpoint"
    with naming_what_to_reduce(f"{advice}; or start anew with a smaller --batch (now {config.batch})"):
        with PROCESS_LOCK:  # runs in other threads draw from the same random numbers
            dataset = load_data(config, data_dir, device, load, check, group)
            described = describe_data(dataset)
            described = check_data(folder, described) if folder.started else described
            trainer = Trainer.build(config, dataset, device, settings, group)
        with folder.locked():
            record = to_json(config, trainer.net.method, described)
            with begun(folder, record, resume):
                within, checkpoints = 60 * checkpoint_minutes or math.inf, checkpoints_of(folder, group)
                run = RunInFolder(trainer, folder, checkpoints, json.loads(record), within)
                return run.train(progress, callback(trainer), until)


def load_data(
    config: Config,
    data_dir: Path,
    device: torch.device,
    load: Callable[[str, Path], Loaded],
    check: Callable[[Loaded], Loaded],
    group: ProcessGroup,
) -> TrainingData:
    """Return what is trained on: ``check`` returns what was loaded, and is called in all processes at once."""
    with group.local_rank_zero_first(device):
        loaded = load(config.dataset, data_dir)
    return data.prepare(check(loaded), config.tokens, config.length)


def checkpoints_of(folder: RunFolder, group: ProcessGroup) -> Checkpoints:
    """Return what writes and reads the checkpoints of a run; every process has one."""
    if not group.shard:
        return folder
    from dcil.runs.sharded_checkpoint import ShardedCheckpoints  # importing it takes a second

    return ShardedCheckpoints(folder.path)


@contextmanager
def begun(folder: RunFolder, record: str, resume: bool) -> Iterator[None]:
    """Begin or continue a run; one whose settings or data turn out wrong before its first checkpoint or metrics leaves
    nothing behind."""
    new = not folder.started
    folder.begin(record, resume)
    try:
        yield
    except RunInterrupted:
        raise
    except UserError:
        if new and not (folder.metrics() or folder.has_checkpoint):
            folder.withdraw()
        raise


def completed(folder: RunFolder, config: Config, resume: bool) -> dict[str, Any] | None:
    """Return the summary of the run in ``folder`` if it is complete, else None; another run is refused."""
    summary = folder.summary()
    if summary is None:
        return None
    if not resume or config_of(folder) != config:
        raise UserError(f"{folder.path} holds another run that is complete; choose another --out")
    if folder.leftovers():
        with suppress(UserError), folder.locked():  # a process that has just ended, or a folder that is read only
            folder.tidy()
    return summary


@dataclass
class RunInFolder:
    """A run in its locked folder.

    checkpoints   what writes and reads its checkpoints
    record        its settings, as config.json has them
    within        seconds after which a checkpoint is written within an epoch
    rows          metrics of the epochs so far
    saved         when the last checkpoint was written, or began to be
    """

    trainer: Trainer
    folder: RunFolder
    checkpoints: Checkpoints
    record: dict[str, Any]
    within: float = math.inf
    rows: list[dict[str, Any]] = field(default_factory=list)
    saved: float = 0.0

    def train(self, progress: Progress, hooks: RunCallback, until: int) -> dict[str, Any]:
        """Train from the checkpoint through epoch ``until``; return the summary if that is the end."""
        trainer, folder = self.trainer, self.folder
        start = self.checkpoints.restore(trainer.net, trainer.optimizer, self.record)
        reached = torch.tensor([start.epoch, start.batch], device=trainer.loader.device)
        trainer.group.check_equal(f"the checkpoint in {folder.path}", reached)
        folder.rewind_metrics(start.epoch)
        folder.tidy()  # here, because nothing is written before all of it is checked
        self.rows = folder.metrics()
        for row in self.rows:
            progress(row["epoch"], 0.0, row)
        hooks.restore(folder.path, start)
        total, self.saved = trainer.config.total_epochs, time.monotonic()
        with saying_resumable():
            try:
                self.run_epochs(start, min(total, until), progress, hooks)
            except BaseException:
                with suppress(Exception):  # a thread may still write, which it must not do once the lock is let go
                    self.checkpoints.wait()
                raise
            self.checkpoints.wait()
            if until < total:
                return {}
            with (
                PROCESS_LOCK
            ):  # counting the work runs the network, which the recording of another run does not survive
                return finish(folder, trainer)

    def run_epochs(self, start: Position, end: int, progress: Progress, hooks: RunCallback) -> None:
        """Train through epoch ``end`` and write checkpoints; one costs as much as many steps, so short epochs share
        one."""
        for epoch in range(start.epoch, end):
            hooks.begin(self.folder.path, epoch)
            evaluate = epoch == self.trainer.config.total_epochs - 1 or hooks.evaluates(epoch)
            row = self.trainer.epoch(epoch, progress, evaluate, start, self.save_within)
            start = START
            self.folder.append(row)
            self.rows.append(row)
            done = epoch + 1
            if due := done == end or hooks.needs_checkpoint(done) or self.is_due(SAVE_EVERY):
                self.save(done, hooks)
            try:
                progress(done, 0.0, row)
            except BaseException:
                if not due:
                    self.save(done, hooks)
                raise

    def is_due(self, seconds: float) -> bool:
        """Return whether the last checkpoint is ``seconds`` old; all processes follow the clock of rank 0."""
        late = time.monotonic() - self.saved >= seconds
        return self.trainer.group.decided(late, self.trainer.loader.device)

    def save(self, epoch: int, hooks: RunCallback) -> None:
        """Write the checkpoint at the end of an epoch."""
        hooks.save(self.folder.path, epoch)
        self.write(Position(epoch))
        hooks.saved(self.folder.path, epoch)

    def save_within(self, position: Callable[[], Position]) -> None:
        """Write a checkpoint within an epoch, if it is due."""
        if self.within < math.inf and self.is_due(self.within):
            self.write(position())

    def write(self, position: Position) -> None:
        self.checkpoints.save(self.trainer.net, self.trainer.optimizer, self.record, self.rows, position)
        self.saved = time.monotonic()


class RunInterrupted(UserError):
    """A run that was on its way could not go on; it can be resumed."""

    exit_code = 1


@contextmanager
def saying_resumable() -> Iterator[None]:
    """Say that a run whose files cannot be written can be resumed: whatever is there is whole."""
    try:
        yield
    except CannotWrite as error:
        raise RunInterrupted(f"{error}; once that is mended, --resume continues from the last checkpoint") from None
