"""The plain training step, one operation after the other: the reference for every other engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer

from dcil import SparseNet, Update
from dcil.data import Batches
from dcil.engine.evaluate import Scores, evaluate
from dcil.engine.executor import EagerExecutor, Inputs, one_at_a_time
from dcil.engine.memory_layout import laid_out, layout_for
from dcil.engine.settings import EngineSettings
from dcil.engine.step_settings import PLAIN, StepSettings
from dcil.errors import Diverged

#: Of loss, hits and targets, where an epoch begins.
NO_SUMS = (0.0, 0.0, 0.0)


def diverged(step: int, loss: float, lr: float) -> Diverged:
    """Return the error for a loss that is not finite."""
    return Diverged(
        f"the loss must be finite, got {loss} at step {step}; the weights are as the step before left them; "
        f"try a smaller learning rate than --lr {lr:g}"
    )


def autocast(device: torch.device, settings: EngineSettings) -> AbstractContextManager[object]:
    """Return the autocast context of the settings' precision."""
    if settings.precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


class EagerEngine:
    """Runs on any device and waits for it at every step."""

    name = "eager"

    def __init__(
        self,
        net: SparseNet,
        optimizer: Optimizer,
        loader: Batches,
        settings: EngineSettings,
        step_settings: StepSettings = PLAIN,
    ) -> None:
        self.net, self.optimizer, self.loader, self.settings = net, optimizer, loader, settings
        self.step_settings = step_settings
        self.executor, self.layout = EagerExecutor(net), layout_for(net, loader.device)
        self._totals = torch.tensor(NO_SUMS, dtype=torch.double)

    def epoch(
        self, epoch: int, rate: Callable[[int], float], start: int = 0, sums: Sequence[float] = NO_SUMS
    ) -> Iterator[Update | None]:
        """Train through the epoch; yield each step's mask update, if any."""
        self._totals = torch.tensor(sums, dtype=torch.double, device=self.loader.device)
        for i, (x, y) in enumerate(self.loader.train(epoch, start), start):
            for group in self.optimizer.param_groups:
                group["lr"] = rate(i)
            totals, update = self.step(laid_out(x, self.layout), y)
            self._totals += totals
            yield update

    def totals(self) -> tuple[float, float, float]:
        """Return the sum of the loss over the targets, the hits and the targets of the epoch, as far as it is."""
        loss, hits, targets = self._totals.tolist()
        return loss, hits, targets

    def loss(self, outputs: Mapping[str, Tensor], y: Tensor) -> Tensor:
        """Return the loss of a batch."""
        return self.step_settings.loss(self.net, outputs, y)

    def step(self, x: Tensor, y: Tensor) -> tuple[Tensor, Update | None]:
        """Run one optimizer step; return what it adds to the totals, and its mask update, if any."""
        with autocast(x.device, self.settings):
            if self.settings.low_memory:
                self.optimizer.zero_grad()
                output, loss = one_at_a_time(self.executor, self.net.method.paths, self.loss, Inputs((x,)), y)
                self.check(loss)
            else:
                outputs = self.net(x)
                output, loss = outputs, self.loss(outputs, y)
                self.check(loss)
                self.optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
        self.step_settings.clip(self.net.parameters())
        self.optimizer.step()
        update = self.net.step(self.optimizer)
        hits = (output["pruned"].detach().argmax(-1) == y).sum()
        return torch.stack([loss.detach() * y.numel(), hits, torch.full_like(hits, y.numel())]).double(), update

    def check(self, loss: Tensor) -> None:
        """Raise Diverged unless the loss is finite."""
        if not math.isfinite(value := loss.item()):
            raise diverged(self.net.steps_done + 1, value, self.optimizer.defaults["lr"])

    def synchronise(self) -> None: ...

    def evaluate(self) -> dict[str, Scores]:
        """Return path -> its scores on the test data."""
        with autocast(self.loader.device, self.settings):
            return evaluate(self.net, self.loader)
