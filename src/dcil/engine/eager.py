"""The plain training step, one operation after the other: what every other engine must agree with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from dcil import SparseNet, Update
from dcil.data import Batches
from dcil.engine.cuda.executor import Eager, one_at_a_time
from dcil.engine.evaluate import evaluate
from dcil.engine.settings import EngineSettings
from dcil.errors import UserError


class Diverged(UserError):
    """The loss is not a finite number any more."""

    exit_code = 1

    @classmethod
    def at(cls, step: int, loss: float, lr: float) -> Diverged:
        return cls(
            f"the loss is {loss} at step {step}; the weights are as the step before left them; "
            f"try a smaller learning rate than --lr {lr:g}"
        )


def autocast(device: torch.device, speed: EngineSettings) -> AbstractContextManager[object]:
    if speed.precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


class EagerEngine:
    """Runs anywhere, waits for the device at every step, and is easy to look into."""

    name = "eager"

    def __init__(self, net: SparseNet, optimizer: torch.optim.SGD, loader: Batches, speed: EngineSettings) -> None:
        self.net, self.optimizer, self.loader, self.speed = net, optimizer, loader, speed
        self.route = Eager(net)
        self._totals = torch.zeros(3, dtype=torch.double)

    def epoch(self, epoch: int, rate: Callable[[int], float]) -> Iterator[Update | None]:
        """Train through the epoch; after each step, the mask update it brought."""
        self._totals = torch.zeros(3, dtype=torch.double, device=self.loader.device)  # loss, hits, images
        for i, (x, y) in enumerate(self.loader.train(epoch)):
            for group in self.optimizer.param_groups:
                group["lr"] = rate(i)
            totals, update = self.step(x, y)
            self._totals += totals
            yield update

    def totals(self) -> tuple[float, float, float]:
        """Sum of the loss, hits and images of the last epoch."""
        loss, hits, images = self._totals.tolist()
        return loss, hits, images

    def step(self, x: Tensor, y: Tensor) -> tuple[Tensor, Update | None]:
        """One optimizer step: what it adds to the totals, and the mask update it brought."""
        with autocast(x.device, self.speed):
            if self.speed.low_memory:
                self.optimizer.zero_grad()
                output, loss = one_at_a_time(self.route, self.net.method.paths, self.net.loss, x, y)
                self.check(loss)
            else:
                outputs = self.net(x)
                output, loss = outputs, self.net.loss(outputs, y)
                self.check(loss)
                self.optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        update = self.net.step(self.optimizer)
        hits = (output["pruned"].detach().argmax(1) == y).sum()
        return torch.stack([loss.detach() * len(y), hits, torch.full_like(hits, len(y))]).double(), update

    def check(self, loss: Tensor) -> None:
        if not math.isfinite(value := loss.item()):
            raise Diverged.at(self.net.steps_done + 1, value, self.optimizer.defaults["lr"])

    def evaluate(self) -> dict[str, tuple[float, float]]:
        with autocast(self.loader.device, self.speed):
            return evaluate(self.net, self.loader)
