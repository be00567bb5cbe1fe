"""Train one epoch and measure: the five lines of the README, with a learning rate and metrics around them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from dcil import SparseNet, Update
from dcil.data import Batches, TrainingData
from dcil.engine import PROCESS_LOCK, Engine, EngineSettings, build, shard
from dcil.engine.memory_layout import layout_for
from dcil.engine.process_group import SINGLE_PROCESS, ProcessGroup
from dcil.errors import UserError
from dcil.runs.position import START, Position
from dcil.runs.progress import Progress
from dcil.train.building import augmented, build_model, build_net, build_optimizer, step_settings
from dcil.train.config import Config

#: Called with a function that returns the position in the epoch, which waits for the device.
AfterBatch = Callable[[Callable[[], Position]], None]
#: The scores of an epoch that was not evaluated.
UNMEASURED: dict[str, Any] = dict.fromkeys(("top1", "top5", "val_loss", "top1_super", "val_loss_super"))


@dataclass
class Trainer:
    """A network, its optimizer, its data and the engine that trains it."""

    config: Config
    net: SparseNet
    optimizer: Optimizer
    loader: Batches
    engine: Engine
    group: ProcessGroup = SINGLE_PROCESS

    @classmethod
    def build(
        cls,
        config: Config,
        dataset: TrainingData,
        device: torch.device,
        settings: EngineSettings | None = None,
        group: ProcessGroup = SINGLE_PROCESS,
    ) -> Trainer:
        """Build the network, optimizer, loader and engine of ``config``."""
        if len(dataset.shape) > 1:
            check_last_batch(config.batch, dataset.train_size, group)
        loader = augmented(config, dataset).loader(config.batch, device, config.seed, group.rank, group.world_size)
        reseed(config.seed, 0)
        check_shards(config, group)
        model, settings = build_model(config, dataset.classes, dataset.shape), settings or EngineSettings()
        model = shard(model, device, settings, group) if group.shard else model.to(device)
        net = build_net(config, model, loader.steps)
        net.warn_of_empty_layers = False  # the notes of the run say so
        if not group.shard:  # FSDP takes no other layout than the usual one
            net.to(memory_format=layout_for(net, device))  # type: ignore[call-overload]  # that of the batches
        optimizer = build_optimizer(config, net)
        engine = build(net, optimizer, loader, settings, group, step_settings(config))
        return cls(config, net, optimizer, loader, engine, group)

    def epoch(
        self,
        epoch: int,
        progress: Progress,
        evaluate: bool = True,
        start: Position = START,
        after_batch: AfterBatch = lambda position: None,
    ) -> dict[str, Any]:
        """Train epoch number ``epoch`` (from 0) and return its metrics; scores are None without ``evaluate``.

        Only network, optimizer and the position within the epoch carry over from earlier steps, so a run can resume
        after any of them: from ``start``. ``after_batch`` is called after each batch but the last.
        """
        self.net.train()
        begun = time.perf_counter() - start.seconds
        updates: list[Update] = []

        def position() -> Position:
            self.engine.synchronise()
            sums, seconds = self.engine.totals(), time.perf_counter() - begun
            return Position(epoch, batch, sums, (*start.updates, *map(as_row, updates)), seconds)

        for batch, update in enumerate(self.train_steps(epoch, start), start.batch + 1):
            updates += [] if update is None else [update]
            progress(epoch, batch / self.loader.steps, None)
            if batch < self.loader.steps:
                after_batch(position)
        loss, hits, targets = self.engine.totals()
        return {
            "epoch": epoch + 1,
            "phase": self.config.phase_at(epoch)[0].name,
            "step": self.net.steps_done,
            "lr": self.optimizer.param_groups[0]["lr"],
            "train_loss": loss / targets,
            "top1_train": 100 * hits / targets,
            **(self.measure() if evaluate else UNMEASURED),
            "sparsity": self.net.sparsity,
            "updates": [list(row) for row in (*start.updates, *map(as_row, updates))],
            "seconds": time.perf_counter() - begun,
        }

    def train_steps(self, epoch: int, start: Position) -> Iterator[Update | None]:
        """Train the epoch from ``start`` on; yield each step's mask update, if any.

        What a step draws (dropout) is seeded from its place alone, so a checkpoint needs no state of it.
        """
        seed, steps, rate = self.config.seed, self.loader.steps, self.config.lr_at
        updates = self.engine.epoch(epoch, lambda i: rate(epoch + i / steps), start.batch, start.sums)
        reseed(seed, epoch + 1, start.batch)
        for batch, update in enumerate(updates, start.batch + 1):
            yield update
            if self.config.dropout:
                reseed(seed, epoch + 1, batch)

    def measure(self) -> dict[str, Any]:
        """Return accuracy and loss of both paths."""
        scores = self.engine.evaluate()
        found: dict[str, Any] = UNMEASURED | {
            "top1": scores["pruned"].top1,
            "top5": scores["pruned"].top5,
            "val_loss": finite(scores["pruned"].loss),
        }
        if "super" in scores:
            found |= {"top1_super": scores["super"].top1, "val_loss_super": finite(scores["super"].loss)}
        return found


def as_row(update: Update) -> tuple[int, ...]:
    """Return an update as metrics.jsonl has it; waits for the device."""
    return (update.step, *update.changes.tolist())


def finite(loss: float) -> float | None:
    """Return a loss as metrics.jsonl has it: JSON has no numbers that are not finite."""
    return loss if math.isfinite(loss) else None


def check_shards(config: Config, group: ProcessGroup) -> None:
    """Refuse to shard a network for a method that must see whole weights."""
    if group.shard and not config.build_method(1).shards():
        raise UserError(f"--method {config.method} must see whole weights, which --shard divides: leave --shard out")


def check_last_batch(batch: int, images: int, group: ProcessGroup) -> None:
    """Refuse a last batch, or a process's share of it, of one image: norm layers cannot train on it."""
    left = min(images, images % batch or batch)
    if left == 1:
        raise UserError(
            f"the last batch must have two images for norm layers, --batch {batch} leaves one image; change it"
        )
    if group.world_size > 1 and group.local_norms and left < 2 * group.world_size:
        raise UserError(
            f"with --local-norms each of {group.world_size} processes must have two images of the last batch, "
            f"--batch {batch} leaves {left} images; change it"
        )


def reseed(seed: int, stream: int, step: int = 0) -> None:
    """Seed torch from (seed, stream, step) alone, for the random numbers of a model: initial weights, dropout."""
    state = np.random.SeedSequence((seed, stream, step)).generate_state(1, np.uint64)
    with PROCESS_LOCK:  # not while a run in another thread draws its weights
        torch.manual_seed(int(state[0]) % 2**63)
