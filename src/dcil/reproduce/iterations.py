"""Accuracy after every iteration of an epoch: the paper's figure of the drops that mask changes cause."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcil.engine import PROCESS_LOCK
from dcil.reproduce import records
from dcil.reproduce.cells import Cell
from dcil.reproduce.pool import Budget
from dcil.reproduce.probe import top1
from dcil.reproduce.session import Run, RunOptions, keep_checkpoint, resume_run, snapshot
from dcil.runs.environment import environment
from dcil.runs.progress import Progress
from dcil.train import Trainer
from dcil.train.parallel import Stopped
from dcil.train.trainer import reseed

FORMAT = "dcil iterations 1"
EPOCHS = (120, 200)  # the paper's figure, counted from 1
SEEDS = 10  # of a cell, that may have left a snapshot
CELLS = (
    Cell("cifar10", "resnet20", "dpf", 0.95),
    Cell("cifar10", "resnet20", "dcil", 0.95, kl=False),
    Cell("cifar10", "resnet20", "dcil", 0.95),
)


def snapshots(run: Run) -> tuple[int, ...]:
    """The epochs before which runs of the figure's cells keep a copy of their checkpoint, for this analysis."""
    return tuple(epoch - 1 for epoch in EPOCHS) if run.cell in CELLS else ()


@dataclass(frozen=True)
class Look:
    """One cell through one epoch (from 1)."""

    run: Run
    epoch: int

    @property
    def file(self) -> Path:
        return self.run.out / "iterations" / f"{self.run.label.replace('/', '-')}-epoch{self.epoch}.json"

    @property
    def needs(self) -> str:
        """What must be done before it, in words."""
        if self.epoch == 1 or snapshot(self.run.folder.path, self.epoch - 1).exists():
            return "one epoch"
        return f"up to {self.epoch - 1} epochs of training, then one"


def looks(out: Path, cells: Sequence[Cell], epochs: Sequence[int], trial: int | None = None) -> list[Look]:
    """One per cell and epoch: the one there is, or one that only needs a snapshot that is there, or seed 0's."""

    def first(cell: Cell, epoch: int) -> Look:
        seeds = [Look(Run(cell, seed, out, trial), epoch) for seed in range(SEEDS)]
        there = [look for look in seeds if look.file.exists()]
        ready = [look for look in seeds if snapshot(look.run.folder.path, epoch - 1).exists()]
        return (there + ready + seeds)[0]

    return [first(cell, epoch) for cell in cells for epoch in sorted(epochs)]


def look(wanted: Look, place: RunOptions, budget: Budget, progress: Progress) -> None:
    """Bring the run to the beginning of the epoch, go through it, write what was seen."""
    run = reach(wanted, place, budget, progress)
    config = run.config()
    with PROCESS_LOCK:  # other runs of this process draw from the same random numbers
        trainer = Trainer.build(config, place.load(config.dataset, place.data_dir), place.device, place.speed)
    epoch, steps = wanted.epoch - 1, trainer.loader.steps
    if epoch > 0:
        run.folder.restore(trainer.net, trainer.optimizer, snapshot(run.folder.path, epoch))
    reseed(trainer.config.seed, epoch + 1)  # as Trainer.epoch does: the same epoch as the run's own
    trainer.net.train()
    seen: list[Tensor] = []
    updates: list[list[Any]] = []
    for i, update in enumerate(trainer.engine.epoch(epoch, lambda i: trainer.config.lr_at(epoch + i / steps))):
        seen.append(top1(trainer.net, trainer.loader, trainer.engine.speed))
        if update is not None:
            updates.append([i + 1, *update.changes.tolist()])
    found = {
        "format": FORMAT,
        "cell": run.cell.id,
        "seed": run.seed,
        "epoch": wanted.epoch,
        "config": run.folder.record(),
        "code": records.code(),
        "environment": environment(place.device) | trainer.engine.speed.record(trainer.engine.name),
        "top1": [round(v, 4) for v in torch.stack(seen).tolist()],
        "updates": updates,
    }
    records.write(wanted.file, found)


def reach(wanted: Look, place: RunOptions, budget: Budget, progress: Progress) -> Run:
    """A run with a checkpoint at the beginning of the epoch: the cell's own, or one of its own if that went past it."""
    before, run = wanted.epoch - 1, wanted.run
    if snapshot(run.folder.path, before).exists():
        return run
    if run.done or run.folder.summary() is not None or len(run.folder.metrics()) > before:
        run = replace(run, out=run.out / "runs" / "iterations")
        if snapshot(run.folder.path, before).exists():
            return run

    def watching(epoch: int, part: float, row: dict[str, Any] | None) -> None:
        progress(epoch, part, row)
        if row is not None and not budget.allows(row["seconds"]):
            raise Stopped

    resume_run(run, place, watching, [e - 1 for e in EPOCHS if e > 1] + [before], until=before)
    if before > 0 and not snapshot(run.folder.path, before).exists():  # it had been stopped just there
        keep_checkpoint(run.folder.path, before)
    return run


def read_all(out: Path) -> list[dict[str, Any]]:
    """Every look below ``out``, by name of the file."""
    found = []
    for file in sorted((out / "iterations").glob("*.json")):
        with records.naming(file):
            look = json.loads(file.read_text(encoding="utf-8"))
            if look["format"] != FORMAT or len(look["top1"]) < 1:
                raise ValueError(f"it is not a {FORMAT}")
            if not all(1 <= step <= len(look["top1"]) for step, _, _ in look["updates"]):
                raise ValueError("it has mask changes after its last iteration")
            _ = str(look["cell"]), int(look["seed"]), int(look["epoch"]), look["config"]["method"]["epoch_steps"]
            found.append(look)
    return found
