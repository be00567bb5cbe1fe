"""The training loop: the five lines of the README, with a learning rate, metrics and checkpoints around them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from dcil import SparseNet, Update, data, models
from dcil.data import Batches, ImageData
from dcil.engine import ALONE, Diverged, EagerEngine, Engine, Speed
from dcil.errors import UserError
from dcil.train import joint
from dcil.train.config import Config
from dcil.train.curve import summarise
from dcil.train.environment import environment
from dcil.train.files import write_text, write_whole
from dcil.train.run import Onlooker, RunFolder
from dcil.train.team import SOLO, Team

#: Called with (epochs done, fraction of the current epoch, the newest metrics or None).
Progress = Callable[[int, float, "dict[str, Any] | None"], None]

NO_END = sys.maxsize
SAVE_EVERY = 5.0  # seconds between checkpoints, at least

__all__ = ["Bystander", "Diverged", "Progress", "Trainer", "train"]


@dataclass
class Trainer:
    """A network, its optimizer and its data, at the end of some epoch."""

    config: Config
    net: SparseNet
    optimizer: torch.optim.SGD
    loader: Batches
    engine: Engine
    team: Team = SOLO

    @classmethod
    def build(
        cls,
        config: Config,
        dataset: ImageData,
        device: torch.device,
        speed: Speed | None = None,
        team: Team = SOLO,
    ) -> Trainer:
        check_last_batch(config.batch, dataset.train_size, team)
        loader = dataset.loader(config.batch, device, config.seed, team.rank, team.world)
        reseed(config.seed, 0)
        model = models.build(config.model, dataset.classes, dataset.shape[0]).to(device)
        net = SparseNet(model, config.build_method(loader.steps))
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # as the batches come: convolutions like it
        optimizer = torch.optim.SGD(
            net.parameters(),
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.momentum > 0,
            weight_decay=config.weight_decay,
        )
        return cls(config, net, optimizer, loader, joint.build(net, optimizer, loader, speed or Speed(), team), team)

    def epoch(self, epoch: int, progress: Progress) -> dict[str, Any]:
        """Train through epoch number ``epoch`` (from 0) and measure. Nothing here depends on the epochs before it
        but the network and the optimizer, so a run can go on from any epoch's end."""
        reseed(self.config.seed, epoch + 1)
        self.net.train()
        start = time.perf_counter()
        updates: list[Update] = []
        rate = self.config.lr_at
        for i, update in enumerate(self.engine.epoch(epoch, lambda i: rate(epoch + i / self.loader.steps))):
            if update is not None:
                updates.append(update)
            progress(epoch, (i + 1) / self.loader.steps, None)
        loss, hits, images = self.engine.totals()
        return {
            "epoch": epoch + 1,
            "phase": self.config.phase_at(epoch)[0].name,
            "step": self.net.steps_done,
            "lr": self.optimizer.param_groups[0]["lr"],
            "train_loss": loss / images,
            "top1_train": 100 * hits / images,
            **self.measure(),
            "updates": [[update.step, *update.changes.tolist()] for update in updates],
            "seconds": time.perf_counter() - start,
        }

    def step(self, x: Tensor, y: Tensor, updates: list[Update]) -> Tensor:
        """One plain step by hand; returns what it adds to an epoch's totals and notes a mask update in ``updates``."""
        totals, update = EagerEngine(self.net, self.optimizer, self.loader, Speed().on(x.device)).step(x, y)
        if update is not None:
            updates.append(update)
        return totals

    def measure(self) -> dict[str, Any]:
        """Accuracy of both paths and sparsity, now."""
        accuracy = self.engine.evaluate()
        top1, top5 = accuracy["pruned"]
        top1_super, _ = accuracy.get("super", (None, None))
        return {"top1": top1, "top5": top5, "top1_super": top1_super, "sparsity": self.net.sparsity}


def check_last_batch(batch: int, images: int, team: Team) -> None:
    """Norm layers cannot train on one image, be it all of the last batch or a process's share of it."""
    if images % batch == 1:
        raise UserError(f"--batch {batch} leaves a last batch of one image, which norm layers cannot train on")
    left = images % batch or batch
    if team.world > 1 and team.local_norms and left < 2 * team.world:
        raise UserError(
            f"--batch {batch} leaves a last batch of {left} images: with --local-norms, each of {team.world} "
            "processes needs two"
        )


def reseed(seed: int, stream: int) -> None:
    """Fresh random numbers that depend on (seed, stream) only, for what a model draws: initial weights, dropout."""
    state = np.random.SeedSequence((seed, stream)).generate_state(1, np.uint64)
    with ALONE:  # not while another run of this process draws its weights
        torch.manual_seed(int(state[0]) % 2**63)


class Bystander:
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
    speed: Speed | None = None,
    load: Callable[[str, Path], ImageData] = data.load,
    team: Team = SOLO,
    beside: Callable[[Trainer], Bystander] = Bystander,
    until: int = NO_END,
) -> dict[str, Any]:
    """Run ``config`` in ``folder``, from its checkpoint if there is one, to the end or through epoch ``until``.

    Returns the summary, an empty one if there is more to train. What ``progress`` raises at the end of an epoch loses
    nothing. In a ``team`` all processes call this; the first one writes, and the others return an empty summary.
    """
    if (done := folder.summary()) is not None:
        return done
    with ALONE:  # other runs of this process draw from the same random numbers
        with team.one_before_the_others(device):
            dataset = load(config.dataset, data_dir)
        trainer = Trainer.build(config, dataset, device, speed, team)
    folder = folder if team.first else Onlooker(folder.path)
    with folder.locked():
        if not folder.started:
            folder.create(config, trainer.net.method, dataset)
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


def go(trainer: Trainer, folder: RunFolder, epochs: range, progress: Progress, bystander: Bystander) -> None:
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
    model = net.finalize()
    if broken := [name for name, value in model.state_dict().items() if not value.isfinite().all()]:
        raise Diverged(f"the last step left weights that are not finite ({broken[0]}); try a smaller learning rate")
    tensors = {key: value.cpu().contiguous().clone() for key, value in model.state_dict().items()}
    write_whole(folder.path / "model.safetensors", lambda draft: save_file(tensors, draft))
    summary = summarize(trainer, rows)
    write_text(folder.path / "summary.json", json.dumps(summary, indent=1))
    return summary


def summarize(trainer: Trainer, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What came of a run, from its metrics and its network."""
    net = trainer.net
    layers = {name: {"weights": m.numel(), "kept": int(m.sum())} for name, m in net.masks.items()}
    found = summarise([row["top1"] for row in rows])
    # Only epochs that are as sparse as the result compete for the best: a network not pruned yet is another network.
    best = max((row for row in rows if row["sparsity"] >= rows[-1]["sparsity"] - 0.01), key=lambda row: row["top1"])
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
