"""Torch's GradScaler in a recorded step: float16 gradients that would underflow are those of a scaled loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dcil.engine.cuda.updates import TorchUpdate
from dcil.engine.executor import Executor


class Scaling:
    """An executor whose backward pass starts from the scaled loss."""

    def __init__(self, executor: Executor, scaler: Any) -> None:
        self.executor, self.scaler = executor, scaler
        self.begin, self.outputs, self.finish = executor.begin, executor.outputs, executor.finish
        self.backend = getattr(executor, "backend", None)

    def backward(self, loss: Tensor) -> None:
        self.executor.backward(self.scaler.scale(loss))


class ScaledUpdate(TorchUpdate):
    """Torch's GradScaler around the optimizer: it skips a step with infinite gradients, and adapts the scale."""

    def __init__(self, optimizer: Optimizer, device: torch.device, scaler: Any) -> None:
        super().__init__(optimizer, device)
        self.scaler = scaler
        self.found_inf: Tensor | None = None

    def unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def step(self) -> None:
        with self.recordable():
            self.scaler.step(self.optimizer)
        self.found_inf = torch.stack(list(self.scaler._found_inf_per_device(self.optimizer).values())).sum()
        self.scaler.update()
