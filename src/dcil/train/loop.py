"""Train a run in its folder: from its checkpoint, epoch by epoch, to the model and the summary."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dcil import data
from dcil.data import ImageData
from dcil.engine import PROCESS_LOCK, Diverged, EngineSettings
from dcil.engine.process_group import SINGLE_PROCESS, ProcessGroup
from dcil.runs.atomic import write_atomically, write_text
from dcil.runs.environment import environment
from dcil.runs.folder import ReadOnlyRunFolder, RunFolder
from dcil.runs.progress import Progress
from dcil.runs.summary import best_epoch, summarise
from dcil.train.config import Config, to_json
from dcil.train.trainer import Trainer

NO_END = sys.maxsize
SAVE_EVERY = 5.0  # least seconds between checkpoints


class RunCallback:
    """Callbacks of a run; the base class does nothing."""

    def __init__(self, trainer: Trainer) -> None: ...

    def restore(self, folder: Path, epoch: int) -> None:
        """Called before training starts or resumes after ``epoch`` epochs."""

    def begin(self, folder: Path, epoch: int) -> None:
        """Called before epoch number ``epoch`` (from 0)."""

    def needs_checkpoint(self, epoch: int) -> bool:
        """Return whether a checkpoint must be written after ``epoch`` epochs."""
        return False

    def save(self, folder: Path, epoch: int) -> None:
        """Called before the checkpoint of ``epoch`` is written."""

    def saved(self, folder: Path, epoch: int) -> None:
        """Called after the checkpoint is written."""


def train(
    config: Config,
    folder: RunFolder,
    data_dir: Path,
    device: torch.device,
    progress: Progress = lambda epoch, part, row: None,
    settings: EngineSettings | None = None,
    load: Callable[[str, Path], ImageData] = data.load,
    group: ProcessGroup = SINGLE_PROCESS,
    callback: Callable[[Trainer], RunCallback] = RunCallback,
    until: int = NO_END,
) -> dict[str, Any]:
    """Train ``config`` in ``folder``, from its checkpoint if there is one, to the end or through epoch ``until``.

    Return the summary, an empty one if there is more to train. An exception that ``progress`` raises at the end of an
    epoch stops the run after its checkpoint. In a process group every rank calls this; only rank 0 writes, and the
    others return an empty summary.
    """
    if (done := folder.summary()) is not None:
        return done
    with PROCESS_LOCK:  # runs in other threads draw from the same random numbers
        with group.local_rank_zero_first(device):
            dataset = load(config.dataset, data_dir)
        trainer = Trainer.build(config, dataset, device, settings, group)
    folder = folder if group.is_rank_zero else ReadOnlyRunFolder(folder.path)
    with folder.locked():
        if not folder.started:
            folder.create(to_json(config, trainer.net.method, dataset.classes, dataset.shape))
        folder.tidy()
        start = folder.restore(trainer.net, trainer.optimizer)
        group.check_equal(f"the checkpoint in {folder.path}", torch.tensor(start, device=device))
        folder.rewind_metrics(start)
        for row in folder.metrics():
            progress(row["epoch"], 0.0, row)
        hooks = callback(trainer)
        hooks.restore(folder.path, start)
        run_epochs(trainer, folder, range(start, min(config.total_epochs, until)), progress, hooks)
        return finish(folder, trainer) if group.is_rank_zero and until >= config.total_epochs else {}


def run_epochs(trainer: Trainer, folder: RunFolder, epochs: range, progress: Progress, hooks: RunCallback) -> None:
    """Train the epochs and write checkpoints; one costs as much as many steps, so short epochs share one."""

    def save(epoch: int) -> float:
        hooks.save(folder.path, epoch)
        folder.save(trainer.net, trainer.optimizer, epoch)
        hooks.saved(folder.path, epoch)
        return time.monotonic()

    saved = time.monotonic()
    for epoch in epochs:
        hooks.begin(folder.path, epoch)
        row = trainer.epoch(epoch, progress)
        folder.append(row)
        done = epoch + 1
        due = done == epochs.stop or hooks.needs_checkpoint(done) or time.monotonic() - saved >= SAVE_EVERY
        if due:
            saved = save(done)
        try:
            progress(done, 0.0, row)
        except BaseException:
            if not due:
                save(done)
            raise


def finish(folder: RunFolder, trainer: Trainer) -> dict[str, Any]:
    """Write the finalized model and, last, the summary that marks the run as complete."""
    net, rows = trainer.net, folder.metrics()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the summary has them as notes
        model = net.finalize()
    if broken := [name for name, value in model.state_dict().items() if not value.isfinite().all()]:
        raise Diverged(f"the trained weights must be finite, {broken[0]} is not; try a smaller learning rate")
    tensors = {key: value.cpu().contiguous().clone() for key, value in model.state_dict().items()}
    write_atomically(folder.path / "model.safetensors", lambda draft: save_file(tensors, draft))
    summary = summary_of(trainer, rows)
    write_text(folder.path / "summary.json", json.dumps(summary, indent=1))
    return summary


def summary_of(trainer: Trainer, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the summary of a run, from its metrics and its network."""
    net = trainer.net
    layers = {name: {"weights": m.numel(), "kept": int(m.sum())} for name, m in net.masks.items()}
    found = summarise([row["top1"] for row in rows])
    best = rows[best_epoch([row["top1"] for row in rows], [row["sparsity"] for row in rows])]
    return {
        "top1_last": found["last"],
        "top1_best": best["top1"],
        "best_epoch": best["epoch"],
        "std_last_10pct": found["std"],
        "top5_last": rows[-1]["top5"],
        "sparsity": net.sparsity,
        "epochs": len(rows),
        "phases": [[phase.name, phase.steps] for phase in trainer.config.phases],
        "seconds": sum(row["seconds"] for row in rows),
        "weights": sum(layer["weights"] for layer in layers.values()),
        "kept": sum(layer["kept"] for layer in layers.values()),
        "layers": layers,
        "notes": net.notes(),
        "environment": environment(trainer.loader.device)
        | trainer.engine.settings.record(trainer.engine.name)
        | trainer.group.record(),
        "complete": True,
    }
