"""One run of a cell: from its checkpoint, if there is one, to its record, watched on the way."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dcil import data
from dcil.data import ImageData
from dcil.engine import ALONE, Speed
from dcil.errors import UserError
from dcil.reproduce import record
from dcil.reproduce.cells import Cell
from dcil.reproduce.watch import Watch
from dcil.train import Config, RunFolder, Trainer
from dcil.train.environment import environment
from dcil.train.loop import Progress, finish

NO_END = sys.maxsize
SAVE_EVERY = 5.0  # seconds between checkpoints, at least


@dataclass(frozen=True)
class Place:
    """Where and how runs are carried out."""

    data_dir: Path
    device: torch.device
    speed: Speed = field(default_factory=Speed)
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


def carry_on(run: Run, place: Place, progress: Progress, snapshots: Sequence[int] = (), until: int = NO_END) -> None:
    """Train ``run`` on, to its end and its record, or to the end of epoch ``until``.

    What ``progress`` raises at the end of an epoch loses nothing. After the epochs in ``snapshots`` a copy of the
    checkpoint is kept.
    """
    folder = run.folder
    with folder.locked():
        if folder.summary() is None:
            trainer = start(run, place)
            epochs = trainer.config.total_epochs
            done = folder.restore(trainer.net, trainer.optimizer)
            folder.rewind_metrics(done)
            watch = Watch(trainer.net, trainer.loader, trainer.engine.speed)
            watch.restore(folder.path, done)
            note_session(folder, done, place)
            go(trainer, watch, folder, range(done, min(epochs, until)), progress, snapshots)
            if until < epochs:
                return
            finish(folder, trainer)
        record.write(run.record, record.of_run(folder, run.cell.id, run.epochs))


def start(run: Run, place: Place) -> Trainer:
    """The network and its data at the beginning, and the folder of the run."""
    config = run.config()
    if run.folder.started and run.folder.config() != config:
        raise UserError(f"{run.folder.path} was started with other settings than the recipe's: remove it first")
    with ALONE:  # other runs of this process draw from the same random numbers
        dataset = place.load(config.dataset, place.data_dir)
        trainer = Trainer.build(config, dataset, place.device, place.speed)
    if not run.folder.started:
        run.folder.create(config, trainer.net.method, dataset)
    run.folder.tidy()
    return trainer


def go(
    trainer: Trainer, watch: Watch, folder: RunFolder, epochs: range, progress: Progress, snapshots: Sequence[int]
) -> None:
    """The epochs one after the other. A checkpoint costs as much as many steps, so short epochs share one."""
    saved = time.monotonic()
    for epoch in epochs:
        watch.begin(epoch, trainer.loader.steps)
        row = trainer.epoch(epoch, progress)
        folder.append(row)
        done = epoch + 1
        due = done == epochs.stop or done in snapshots or time.monotonic() - saved >= SAVE_EVERY
        if due:
            saved = save(trainer, watch, folder, done)
        if done in snapshots:
            shutil.copyfile(folder.path / "checkpoint.safetensors", snapshot(folder, done))
        try:
            progress(done, 0.0, row)
        except BaseException:
            if not due:
                save(trainer, watch, folder, done)
            raise


def save(trainer: Trainer, watch: Watch, folder: RunFolder, epoch: int) -> float:
    """Everything to go on from; returns when that was."""
    watch.save(folder.path, epoch)
    folder.save(trainer.net, trainer.optimizer, epoch)
    return time.monotonic()


def snapshot(folder: RunFolder, epoch: int) -> Path:
    return folder.path / f"at{epoch}.safetensors"


def note_session(folder: RunFolder, done: int, place: Place) -> None:
    """A run may go on elsewhere: from which epoch on, with what code, on what hardware, beside how many others."""
    entry = {"after": done, "code": record.code(), "environment": environment(place.device), "at_once": place.at_once}
    with (folder.path / "sessions.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
