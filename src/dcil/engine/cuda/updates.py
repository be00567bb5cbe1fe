"""Update the weights inside a recorded step: SGD on flat parameters in one kernel, or torch's own optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import SGD as TorchSGD
from torch.optim import Optimizer

from dcil.engine.cuda.flat import FlatParameters
from dcil.engine.cuda.sgd import SGD


class WeightUpdate(Protocol):
    def set_rates(self) -> None:
        """Called before a step: take the learning rates that the optimizer's groups have now."""

    def unscale(self) -> None:
        """Called before gradients are clipped: take back what the loss was scaled with."""

    def step(self) -> None:
        """Update the weights by their gradients."""


class FlatUpdate:
    """SGD on the flat parameters; a step whose loss was not finite (``diverged`` is not 0) changes nothing."""

    def __init__(self, optimizer: TorchSGD, flat: FlatParameters, diverged: Tensor, exact: bool) -> None:
        self.optimizer, self.flat, self.diverged, self.exact = optimizer, flat, diverged, exact
        self.minus_lr = torch.zeros((), device=flat.device)
        self.rate: float | None = None

    def set_rates(self) -> None:
        rate = self.optimizer.param_groups[0]["lr"]
        if isinstance(rate, Tensor):
            torch.neg(rate, out=self.minus_lr)
        elif rate != self.rate:
            self.minus_lr.fill_(-rate)
            self.rate = rate

    def unscale(self) -> None: ...

    def step(self) -> None:
        flat, sgd = self.flat, SGD.from_optimizer(self.optimizer)
        sgd.step(flat.weights, flat.gradient, flat.momentum, self.minus_lr, self.diverged, self.exact)


class TorchUpdate:
    """The user's optimizer as it is. While it steps, its learning rates are tensors, which change between replays, and
    it computes where a recording can follow it (``capturable``, or ``fused`` for SGD); afterwards it is as it was."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self.rates = [torch.zeros((), device=device) for _ in optimizer.param_groups]
        self.known: list[Any] = [None] * len(self.rates)

    def set_rates(self) -> None:
        for i, (rate, group) in enumerate(zip(self.rates, self.optimizer.param_groups, strict=True)):
            if isinstance(group["lr"], Tensor):
                rate.copy_(group["lr"], non_blocking=True)
            elif group["lr"] != self.known[i]:
                rate.fill_(group["lr"])
            self.known[i] = group["lr"]

    def unscale(self) -> None: ...

    def step(self) -> None:
        with self.recordable():
            self.optimizer.step()

    @contextmanager
    def recordable(self) -> Iterator[None]:
        """While open, the groups have settings that can be recorded."""
        if self.rates[0].device.type != "cuda":
            yield  # nothing is recorded
            return
        groups = self.optimizer.param_groups
        before = [dict(group) for group in groups]
        for group, rate in zip(groups, self.rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True
            if isinstance(self.optimizer, TorchSGD):  # the others read the rate back
                group["fused"], group["foreach"] = True, False
        try:
            yield
        finally:
            for group, settings in zip(groups, before, strict=True):
                group.update(settings)


def move_steps(optimizer: Optimizer, device: torch.device) -> None:
    """Keep the optimizer's step counts on the device, where a recording counts them."""
    for state in optimizer.state.values():
        if isinstance(step := state.get("step"), Tensor) and step.device != device:
            state["step"] = step.to(device)
