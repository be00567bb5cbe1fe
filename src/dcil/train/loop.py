"""A run: the epochs one after the other, in a folder from which it can go on, to the model and the summary."""

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
SAVE_EVERY = 5.0  # seconds between checkpoints, at least


class RunCallback:
    """Somebody beside a run, told when it goes on and when it is saved. This one does nothing with it."""

    def __init__(self, trainer: Trainer) -> None: ...

    def restore(self, folder: Path, epoch: int) -> None:
        """The run goes on after ``epoch`` epochs."""

    def begin(self, folder: Path, epoch: int) -> None:
        """Epoch number ``epoch`` (from 0) begins."""

    def wants(self, epoch: int) -> bool:
        """Must there be a checkpoint after ``epoch`` epochs?"""
        return False

    def save(self, folder: Path, epoch: int) -> None:
        """The checkpoint of ``epoch`` is about to be written."""

    def saved(self, folder: Path, epoch: int) -> None:
        """It is there."""


def train(
    config: Config,
    folder: RunFolder,
    data_dir: Path,
    device: torch.device,
    progress: Progress = lambda epoch, part, row: None,
    speed: EngineSettings | None = None,
    load: Callable[[str, Path], ImageData] = data.load,
    team: ProcessGroup = SINGLE_PROCESS,
    beside: Callable[[Trainer], RunCallback] = RunCallback,
    until: int = NO_END,
) -> dict[str, Any]:
    """Run ``config`` in ``folder``, from its checkpoint if there is one, to the end or through epoch ``until``.

    Returns the summary, an empty one if there is more to train. What ``progress`` raises at the end of an epoch loses
    nothing. In a ``team`` all processes call this; the first one writes, and the others return an empty summary.
    """
    if (done := folder.summary()) is not None:
        return done
    with PROCESS_LOCK:  # other runs of this process draw from the same random numbers
        with team.one_before_the_others(device):
            dataset = load(config.dataset, data_dir)
        trainer = Trainer.build(config, dataset, device, speed, team)
    folder = folder if team.first else ReadOnlyRunFolder(folder.path)
    with folder.locked():
        if not folder.started:
            folder.create(to_json(config, trainer.net.method, dataset.classes, dataset.shape))
        folder.tidy()
        start = folder.restore(trainer.net, trainer.optimizer)
        team.agree(f"the checkpoint in {folder.path}", torch.tensor(start, device=device))
        folder.rewind_metrics(start)
        for row in folder.metrics():
            progress(row["epoch"], 0.0, row)
        bystander = beside(trainer)
        bystander.restore(folder.path, start)
        go(trainer, folder, range(start, min(config.total_epochs, until)), progress, bystander)
        return finish(folder, trainer) if team.first and until >= config.total_epochs else {}


def go(trainer: Trainer, folder: RunFolder, epochs: range, progress: Progress, bystander: RunCallback) -> None:
    """The epochs one after the other. A checkpoint costs as much as many steps, so short epochs share one."""

    def save(epoch: int) -> float:
        bystander.save(folder.path, epoch)
        folder.save(trainer.net, trainer.optimizer, epoch)
        bystander.saved(folder.path, epoch)
        return time.monotonic()

    saved = time.monotonic()
    for epoch in epochs:
        bystander.begin(folder.path, epoch)
        row = trainer.epoch(epoch, progress)
        folder.append(row)
        done = epoch + 1
        due = done == epochs.stop or bystander.wants(done) or time.monotonic() - saved >= SAVE_EVERY
        if due:
            saved = save(done)
        try:
            progress(done, 0.0, row)
        except BaseException:
            if not due:
                save(done)
            raise


def finish(folder: RunFolder, trainer: Trainer) -> dict[str, Any]:
    """The finalized model and, last of all, the summary that marks the run as complete."""
    net, rows = trainer.net, folder.metrics()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the summary has them as notes
        model = net.finalize()
    if broken := [name for name, value in model.state_dict().items() if not value.isfinite().all()]:
        raise Diverged(f"the last step left weights that are not finite ({broken[0]}); try a smaller learning rate")
    tensors = {key: value.cpu().contiguous().clone() for key, value in model.state_dict().items()}
    write_atomically(folder.path / "model.safetensors", lambda draft: save_file(tensors, draft))
    summary = summarize(trainer, rows)
    write_text(folder.path / "summary.json", json.dumps(summary, indent=1))
    return summary


def summarize(trainer: Trainer, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What came of a run, from its metrics and its network."""
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
        | trainer.engine.speed.record(trainer.engine.name)
        | trainer.team.record(),
        "complete": True,
    }
