"""One epoch of training: the five lines of the README, with a learning rate and metrics around them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dcil import SparseNet, Update, models
from dcil.data import Batches, ImageData
from dcil.engine import PROCESS_LOCK, EagerEngine, Engine, EngineSettings, data_parallel
from dcil.engine.process_group import SINGLE_PROCESS, ProcessGroup
from dcil.errors import UserError
from dcil.runs.progress import Progress
from dcil.train.config import Config


@dataclass
class Trainer:
    """A network, its optimizer and its data, at the end of some epoch."""

    config: Config
    net: SparseNet
    optimizer: torch.optim.SGD
    loader: Batches
    engine: Engine
    team: ProcessGroup = SINGLE_PROCESS

    @classmethod
    def build(
        cls,
        config: Config,
        dataset: ImageData,
        device: torch.device,
        speed: EngineSettings | None = None,
        team: ProcessGroup = SINGLE_PROCESS,
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
        return cls(
            config,
            net,
            optimizer,
            loader,
            data_parallel.build(net, optimizer, loader, speed or EngineSettings(), team),
            team,
        )

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
        totals, update = EagerEngine(self.net, self.optimizer, self.loader, EngineSettings().on(x.device)).step(x, y)
        if update is not None:
            updates.append(update)
        return totals

    def measure(self) -> dict[str, Any]:
        """Accuracy of both paths and sparsity, now."""
        accuracy = self.engine.evaluate()
        top1, top5 = accuracy["pruned"]
        top1_super, _ = accuracy.get("super", (None, None))
        return {"top1": top1, "top5": top5, "top1_super": top1_super, "sparsity": self.net.sparsity}


def check_last_batch(batch: int, images: int, team: ProcessGroup) -> None:
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
    with PROCESS_LOCK:  # not while another run of this process draws its weights
        torch.manual_seed(int(state[0]) % 2**63)
