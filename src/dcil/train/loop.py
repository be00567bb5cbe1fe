"""The training loop: the five lines of the README, with a learning rate, metrics and checkpoints around them."""

from __future__ import annotations

import json
import math
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
from dcil.errors import UserError
from dcil.train.config import Config
from dcil.train.curve import summarise
from dcil.train.environment import environment
from dcil.train.evaluate import evaluate
from dcil.train.files import write_text, write_whole
from dcil.train.run import RunFolder

#: Called with (epochs done, fraction of the current epoch, the newest metrics or None).
Progress = Callable[[int, float, "dict[str, Any] | None"], None]


class Diverged(UserError):
    """The loss is not a finite number any more."""

    exit_code = 1


@dataclass
class Trainer:
    """A network, its optimizer and its data, at the end of some epoch."""

    config: Config
    net: SparseNet
    optimizer: torch.optim.SGD
    loader: Batches

    @classmethod
    def build(cls, config: Config, dataset: ImageData, device: torch.device) -> Trainer:
        loader = dataset.loader(config.batch, device, config.seed)
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
        return cls(config, net, optimizer, loader)

    def epoch(self, epoch: int, progress: Progress) -> dict[str, Any]:
        """Train through epoch number ``epoch`` (from 0) and measure. Nothing here depends on the epochs before it
        but the network and the optimizer, so a run can go on from any epoch's end."""
        reseed(self.config.seed, epoch + 1)
        self.net.train()
        start = time.perf_counter()
        totals = torch.zeros(3, dtype=torch.double, device=self.loader.device)  # loss, hits, images
        updates: list[Update] = []
        for i, (x, y) in enumerate(self.loader.train(epoch)):
            self.set_lr(self.config.lr_at(epoch + i / self.loader.steps))
            totals += self.step(x, y, updates)
            progress(epoch, (i + 1) / self.loader.steps, None)
        loss, hits, images = totals.tolist()
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
        """One optimizer step; returns what it adds to the epoch's totals and notes a mask update in ``updates``."""
        outputs = self.net(x)
        loss = self.net.loss(outputs, y)
        if not math.isfinite(value := loss.item()):
            raise Diverged(
                f"the loss is {value} at step {self.net.steps_done + 1}; the weights are as the step before left "
                f"them; try a smaller learning rate than --lr {self.config.lr:g}"
            )
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        if (update := self.net.step(self.optimizer)) is not None:
            updates.append(update)
        hits = (outputs["pruned"].detach().argmax(1) == y).sum()
        return torch.stack([loss.detach() * len(y), hits, torch.full_like(hits, len(y))]).double()

    def measure(self) -> dict[str, Any]:
        """Accuracy of both paths and sparsity, now."""
        accuracy = evaluate(self.net, self.loader)
        top1, top5 = accuracy["pruned"]
        top1_super, _ = accuracy.get("super", (None, None))
        return {"top1": top1, "top5": top5, "top1_super": top1_super, "sparsity": self.net.sparsity}

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr


def reseed(seed: int, stream: int) -> None:
    """Fresh random numbers that depend on (seed, stream) only, for what a model draws: initial weights, dropout."""
    state = np.random.SeedSequence((seed, stream)).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]) % 2**63)


def train(
    config: Config,
    folder: RunFolder,
    data_dir: Path,
    device: torch.device,
    progress: Progress = lambda epoch, part, row: None,
) -> dict[str, Any]:
    """Run ``config`` in ``folder``, from its checkpoint if there is one; returns the summary."""
    if (done := folder.summary()) is not None:
        return done
    dataset = data.load(config.dataset, data_dir)
    trainer = Trainer.build(config, dataset, device)
    if not folder.started:
        folder.create(config, trainer.net.method, dataset)
    folder.tidy()
    start = folder.restore(trainer.net, trainer.optimizer)
    folder.rewind_metrics(start)
    for row in folder.metrics():
        progress(row["epoch"], 0.0, row)
    for epoch in range(start, config.total_epochs):
        row = trainer.epoch(epoch, progress)
        folder.append(row)
        folder.save(trainer.net, trainer.optimizer, epoch + 1)
        progress(epoch + 1, 0.0, row)
    return finish(folder, trainer)


def finish(folder: RunFolder, trainer: Trainer) -> dict[str, Any]:
    """The finalized model and, last of all, the summary that marks the run as complete."""
    net, rows = trainer.net, folder.metrics()
    model = net.finalize()
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
    return {
        "top1_last": found["last"],
        "top1_best": found["best"],
        "best_epoch": found["best_epoch"],
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
        "environment": environment(trainer.loader.device),
        "complete": True,
    }
