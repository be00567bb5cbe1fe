"""One run of a cell: from its checkpoint, if there is one, to its record, watched on the way."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dcil import data
from dcil.data import ImageData
from dcil.engine import EngineSettings
from dcil.errors import UserError
from dcil.reproduce import records
from dcil.reproduce.cells import Cell
from dcil.reproduce.probe import MaskProbe
from dcil.runs.atomic import write_atomically
from dcil.runs.environment import environment
from dcil.runs.progress import Progress
from dcil.train import Config, RunFolder, Trainer, train
from dcil.train.loop import NO_END, RunCallback
from dcil.train.restore import config_of


@dataclass(frozen=True)
class RunOptions:
    """Where and how runs are carried out."""

    data_dir: Path
    device: torch.device
    speed: EngineSettings = field(default_factory=EngineSettings)
    at_once: int = 1
    load: Callable[[str, Path], ImageData] = data.load


@dataclass(frozen=True)
class Run:
    """A cell with one seed, below the folder of results ``out``; ``epochs`` where it is a trial."""

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


def resume_run(
    run: Run, place: RunOptions, progress: Progress, snapshots: Sequence[int] = (), until: int = NO_END
) -> None:
    """Train ``run`` on, to its end and its record, or to the end of epoch ``until``.

    What ``progress`` raises at the end of an epoch loses nothing. After the epochs in ``snapshots`` a copy of the
    checkpoint is kept.
    """
    if run.done:  # by another process, since somebody looked
        return
    config = run.config()
    if run.folder.started and config_of(run.folder) != config:
        raise UserError(f"{run.folder.path} was started with other settings than the recipe's: remove it first")

    def callback(trainer: Trainer) -> ProbeCallback:
        return ProbeCallback(trainer, place, snapshots)

    where = place.data_dir, place.device
    if train(config, run.folder, *where, progress, place.speed, place.load, callback=callback, until=until):
        records.write(run.record, records.of_run(run.folder, run.cell.id, run.epochs))


class ProbeCallback(RunCallback):
    """Watches what mask updates do, and keeps the checkpoints that are asked for."""

    def __init__(self, trainer: Trainer, place: RunOptions, snapshots: Sequence[int]) -> None:
        self.place, self.snapshots, self.steps = place, snapshots, trainer.loader.steps
        self.watch = MaskProbe(trainer.net, trainer.loader, trainer.engine.speed)
        self.noted = False

    def restore(self, folder: Path, epoch: int) -> None:
        self.watch.restore(folder, epoch)

    def begin(self, folder: Path, epoch: int) -> None:
        if not self.noted:
            records.note_session(folder, epoch, environment=environment(self.place.device), at_once=self.place.at_once)
            self.noted = True
        self.watch.begin(epoch, self.steps)

    def wants(self, epoch: int) -> bool:
        return epoch in self.snapshots

    def save(self, folder: Path, epoch: int) -> None:
        self.watch.save(folder, epoch)

    def saved(self, folder: Path, epoch: int) -> None:
        if epoch in self.snapshots:
            keep_checkpoint(folder, epoch)


def keep_checkpoint(folder: Path, epoch: int) -> None:
    write_atomically(snapshot(folder, epoch), lambda draft: shutil.copyfile(folder / "checkpoint.safetensors", draft))


def snapshot(folder: Path, epoch: int) -> Path:
    return folder / f"at{epoch}.safetensors"
