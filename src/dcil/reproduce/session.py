"""One run of a cell: resumed from its checkpoint, observed by the mask probe, and recorded."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dcil import data
from dcil.data import Loaded
from dcil.engine import EngineSettings
from dcil.errors import UserError
from dcil.reproduce import records
from dcil.reproduce.cells import Cell
from dcil.reproduce.needed_epochs import needed_epochs
from dcil.reproduce.probe import MaskProbe
from dcil.runs.atomic import write_atomically
from dcil.runs.environment import environment
from dcil.runs.file_lock import exclusive
from dcil.runs.position import Position
from dcil.runs.progress import Progress
from dcil.train import Config, RunFolder, Trainer, train
from dcil.train.loop import NO_END, RunCallback
from dcil.train.restore import config_of


@dataclass(frozen=True)
class RunOptions:
    """Where and how runs are trained."""

    data_dir: Path
    device: torch.device
    settings: EngineSettings = field(default_factory=EngineSettings)
    at_once: int = 1
    load: Callable[[str, Path], Loaded] = data.load


@dataclass(frozen=True)
class CellRun:
    """A cell with one seed, below the folder of results ``out``; ``epochs`` is set for a trial."""

    cell: Cell
    seed: int
    out: Path
    epochs: int | None = None

    @property
    def label(self) -> str:
        return f"{self.cell.id}-seed{self.seed}"

    @property
    def record(self) -> Path:
        return self.out / f"{self.label}.json"

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.out / "runs" / self.label)

    @property
    def done(self) -> bool:
        return self.record.exists()

    def config(self) -> Config:
        return self.cell.config(self.seed, self.epochs)

    def locked(self) -> AbstractContextManager[None]:
        """Lock the run from the look for its record to the removal of its working files.

        The lock of the working folder ends with the training: a process that looked for the record before it was
        written, and for the folder after it was removed, would train the run again.
        """
        folder = self.folder.path
        busy = f"one process at a time may train {self.label} below {self.out}; the same command continues it later"
        return exclusive(folder.with_name(f".{folder.name}.lock"), busy)


def resume_run(
    run: CellRun, options: RunOptions, progress: Progress, snapshots: Sequence[int] = (), until: int = NO_END
) -> None:
    """Train ``run``, which is locked, to its end and write its record, or train it to the end of epoch ``until``.

    An exception from ``progress`` at the end of an epoch loses no training. After the epochs in ``snapshots`` a copy
    of the checkpoint is kept.
    """
    if run.done:  # recorded by another process in the meantime
        return
    config = run.config()
    if run.folder.started and config_of(run.folder) != config:
        raise UserError(
            f"{run.folder.path} must have the settings of its recipe, has other settings; remove it to train anew"
        )

    def callback(trainer: Trainer) -> ProbeCallback:
        return ProbeCallback(trainer, options, snapshots)

    where = options.data_dir, options.device
    if train(config, run.folder, *where, progress, options.settings, options.load, callback=callback, until=until):
        records.write(run.record, records.from_run_folder(run.folder, run.cell.id, run.epochs))


class ProbeCallback(RunCallback):
    """Feeds the mask probe and keeps copies of the requested checkpoints."""

    def __init__(self, trainer: Trainer, options: RunOptions, snapshots: Sequence[int]) -> None:
        self.options, self.snapshots, self.steps = options, snapshots, trainer.loader.steps
        self.probe = MaskProbe(trainer.net, trainer.loader, trainer.engine.settings)
        self.engine = trainer.engine.settings.record(trainer.engine.name)
        self.session_recorded = False
        self.needed = needed_epochs(trainer.net.method, trainer.config.total_epochs)

    def restore(self, folder: Path, position: Position) -> None:
        self.probe.restore(folder, position)

    def begin(self, folder: Path, epoch: int) -> None:
        if not self.session_recorded:
            where = environment(self.options.device) | self.engine
            records.append_session(folder, epoch, environment=where, at_once=self.options.at_once)
            self.session_recorded = True
        self.probe.begin(epoch, self.steps)

    def evaluates(self, epoch: int) -> bool:
        return epoch in self.needed

    def needs_checkpoint(self, epoch: int) -> bool:
        return epoch in self.snapshots

    def save(self, folder: Path, epoch: int) -> None:
        self.probe.save(folder, epoch)

    def saved(self, folder: Path, epoch: int) -> None:
        if epoch in self.snapshots:
            keep_checkpoint(folder, epoch)


def keep_checkpoint(folder: Path, epoch: int) -> None:
    """Copy the checkpoint of a run folder to its snapshot."""
    write_atomically(snapshot(folder, epoch), lambda draft: shutil.copyfile(folder / "checkpoint.safetensors", draft))


def snapshot(folder: Path, epoch: int) -> Path:
    """Return the path of the checkpoint that is kept after ``epoch``."""
    return folder / f"at{epoch}.safetensors"
