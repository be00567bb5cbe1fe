"""Iteration traces: accuracy after every iteration of an epoch, as in the paper's figure of drops at mask changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcil import data
from dcil.engine import PROCESS_LOCK
from dcil.reproduce import records
from dcil.reproduce.cells import Cell
from dcil.reproduce.probe import top1
from dcil.reproduce.record_fields import TRACE
from dcil.reproduce.session import CellRun, RunOptions, keep_checkpoint, resume_run, snapshot
from dcil.runs.environment import environment
from dcil.runs.progress import Progress
from dcil.train import Trainer
from dcil.train.budget import Budget
from dcil.train.parallel import Stopped
from dcil.train.restore import settings_of
from dcil.train.trainer import reseed

FORMAT = "dcil iterations 1"
EPOCHS = (120, 200)  # the paper's figure, counted from 1
SEEDS = 10  # of a cell, that are searched for a snapshot
CELLS = (
    Cell("cifar10", "resnet20", "dpf", 0.95),
    Cell("cifar10", "resnet20", "dcil", 0.95, kl=False),
    Cell("cifar10", "resnet20", "dcil", 0.95),
)


def snapshots(run: CellRun) -> tuple[int, ...]:
    """Return the epochs after which a run of the figure's cells keeps a copy of its checkpoint, for its traces."""
    return tuple(epoch - 1 for epoch in EPOCHS) if run.cell in CELLS else ()


@dataclass(frozen=True)
class IterationTrace:
    """One epoch (from 1) of one run."""

    run: CellRun
    epoch: int

    @property
    def file(self) -> Path:
        return self.run.out / "iterations" / f"{self.run.label.replace('/', '-')}-epoch{self.epoch}.json"

    @property
    def training(self) -> str:
        """The training that it takes, in words."""
        if self.epoch == 1 or snapshot(self.run.folder.path, self.epoch - 1).exists():
            return "one epoch"
        return f"up to {self.epoch - 1} epochs of training, then one"


def choose_traces(
    out: Path, cells: Sequence[Cell], epochs: Sequence[int], trial: int | None = None
) -> list[IterationTrace]:
    """Choose one per cell and epoch: a recorded one, else one that has a snapshot, else that of seed 0."""

    def choose(cell: Cell, epoch: int) -> IterationTrace:
        seeds = [IterationTrace(CellRun(cell, seed, out, trial), epoch) for seed in range(SEEDS)]
        recorded = [trace for trace in seeds if trace.file.exists()]
        ready = [trace for trace in seeds if snapshot(trace.run.folder.path, epoch - 1).exists()]
        return (recorded + ready + seeds)[0]

    return [choose(cell, epoch) for cell in cells for epoch in sorted(epochs)]


def record_trace(trace: IterationTrace, options: RunOptions, budget: Budget, progress: Progress) -> None:
    """Train the run to the beginning of the epoch, evaluate after each iteration of the epoch, write the trace."""
    run = train_to_epoch(trace, options, budget, progress)
    config = run.config()
    with PROCESS_LOCK:  # other runs of this process share the random state
        loaded = options.load(config.dataset, options.data_dir)
        dataset = data.prepare(loaded, config.tokens, config.length)
        trainer = Trainer.build(config, dataset, options.device, options.settings)
    epoch, steps = trace.epoch - 1, trainer.loader.steps
    if epoch > 0:
        file = snapshot(run.folder.path, epoch)
        run.folder.restore(trainer.net, trainer.optimizer, settings_of(run.folder)[1], file)
    reseed(trainer.config.seed, epoch + 1)  # as Trainer.epoch does: the same epoch as the run's own
    trainer.net.train()
    accuracy: list[Tensor] = []
    updates: list[list[Any]] = []
    for i, update in enumerate(trainer.engine.epoch(epoch, lambda i: trainer.config.lr_at(epoch + i / steps))):
        accuracy.append(top1(trainer.net, trainer.loader, trainer.engine.settings))
        if update is not None:
            updates.append([i + 1, *update.changes.tolist()])
    content = {
        "format": FORMAT,
        "cell": run.cell.id,
        "seed": run.seed,
        "epoch": trace.epoch,
        "config": run.folder.record(),
        "code": records.code_version(),
        "environment": environment(options.device) | trainer.engine.settings.record(trainer.engine.name),
        "top1": [round(v, 4) for v in torch.stack(accuracy).tolist()],
        "updates": updates,
    }
    records.write(trace.file, content)


def train_to_epoch(trace: IterationTrace, options: RunOptions, budget: Budget, progress: Progress) -> CellRun:
    """Return a run with a checkpoint at the beginning of the epoch: the cell's own run, or a second one if that is
    past it."""
    before, run = trace.epoch - 1, trace.run
    if snapshot(run.folder.path, before).exists():
        return run
    if run.done or run.folder.summary() is not None or len(run.folder.metrics()) > before:
        run = replace(run, out=run.out / "runs" / "iterations")
        if snapshot(run.folder.path, before).exists():
            return run

    def progress_within_budget(epoch: int, part: float, row: dict[str, Any] | None) -> None:
        progress(epoch, part, row)
        if row is not None and not budget.allows(row["seconds"]):
            raise Stopped

    with run.locked():
        if run.done:  # by another process in the meantime: its checkpoint is past the epoch
            return train_to_epoch(trace, options, budget, progress)
        resume_run(run, options, progress_within_budget, [e - 1 for e in EPOCHS if e > 1] + [before], until=before)
        if before > 0 and not snapshot(run.folder.path, before).exists():  # it had been stopped at this epoch
            keep_checkpoint(run.folder.path, before)
    return run


def read(file: Path) -> dict[str, Any]:
    """Read and check an iteration trace."""
    with records.naming_record(file):
        trace = records.read_json(file, FORMAT, TRACE)
        if not all(1 <= step <= len(trace["top1"]) for step, _, _ in trace["updates"]):
            raise ValueError("its mask changes must be within its iterations")
        return trace


def read_all(out: Path) -> list[dict[str, Any]]:
    """Read every trace below ``out``, in the order of file names."""
    return [read(file) for file in sorted((out / "iterations").glob("*.json"))]
