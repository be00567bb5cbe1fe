"""One optimizer step on inputs in fixed memory: everything that a recording replays, for both doors of the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dcil import SparseNet
from dcil.engine.cuda.updates import WeightUpdate
from dcil.engine.executor import Executor, Gradients, Inputs, Loss, OnLoss, Outputs, all_at_once, ignore, one_at_a_time


@dataclass
class TrainingStep:
    """
    executor    computes outputs and gradients
    update      changes the weights by them
    loss        of the outputs of all paths and the target
    low_memory  one path's activations at a time
    clip_norm   largest norm of all gradients together; 0: any
    parts       batches whose gradients are averaged before the weights are updated
    average     averages gradients over processes, in place
    """

    net: SparseNet
    optimizer: Optimizer
    executor: Executor
    update: WeightUpdate
    loss: Loss
    low_memory: bool = False
    clip_norm: float = 0.0
    parts: int = 1
    average: Callable[[Sequence[Tensor]], None] | None = None
    totals: Gradients = field(default_factory=dict)

    def begin(self) -> None:
        """Prepare what does not depend on the batch."""
        self.executor.begin()

    def compute(self, inputs: Inputs, target: Any, on_loss: OnLoss = ignore) -> tuple[Outputs, Tensor]:
        """Run all paths forward and backward."""
        run = one_at_a_time if self.low_memory else all_at_once
        return run(self.executor, self.net.method.paths, self.loss, inputs, target, on_loss)

    @torch.no_grad()
    def collect(self, last: bool = True) -> Gradients:
        """Return the gradients, where the optimizer reads them; of several parts their mean, after the ``last`` one."""
        gradients = self.executor.finish()
        if self.parts > 1:
            new = [owner for owner in gradients if owner not in self.totals]
            self.totals |= {owner: torch.zeros_like(gradients[owner]) for owner in new}
            totals = [self.totals[owner] for owner in gradients]
            torch._foreach_add_(totals, list(gradients.values()), alpha=1 / self.parts)
            if last:
                self.hand_out(gradients)
        if last and self.average is not None:
            self.average(list(gradients.values()))
        return gradients

    def hand_out(self, gradients: Gradients) -> None:
        """Put the totals in the place of the last part's gradients, and begin anew."""
        for owner in self.totals.keys() - gradients.keys():  # the last part did not need it
            owner.grad = gradients[owner] = torch.empty_like(self.totals[owner])
        torch._foreach_copy_(list(gradients.values()), [self.totals[owner] for owner in gradients])
        torch._foreach_zero_(list(self.totals.values()))

    @torch.no_grad()
    def apply(self) -> None:
        """Update the weights by the gradients, and whatever the method does after a step."""
        if self.clip_norm:
            self.update.unscale()
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.clip_norm)
        self.update.step()
        context = self.net.context(self.optimizer)
        self.net.method.after_step(dataclasses.replace(context, step=context.step + 1))
