"""Method: frozen settings and a few hooks. A new method overrides one or two of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from dcil import views
from dcil.criteria import Criterion, Magnitude
from dcil.errors import UserError
from dcil.granularity import Granularity, Weight
from dcil.layer import Layer
from dcil.masks import select
from dcil.schedule import Cubic

Task = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Method:
    """Dynamic pruning by score: every F steps the masks are recomputed from all weights, pruned ones included.

    sparsity      fraction of the groups (weights, filters) that are pruned in the end
    steps         optimizer steps of the whole training; from then on the masks stay as they are
    ramp          part of ``steps`` after which ``sparsity`` is reached (the paper: epoch 225 of 300)
    every         F of the paper: steps from one mask update to the next
    epoch_steps   hold the scheduled sparsity for this many steps: an epoch, as the authors do, or 1 = smooth
    granularity   what is pruned as one piece
    criterion     what a weight is worth
    """

    sparsity: float
    steps: int
    ramp: float = 0.75
    every: int = 16
    epoch_steps: int = 1
    granularity: Granularity = Weight()
    criterion: Criterion = Magnitude()

    #: Path name -> the view its layers see in training. The first path, "pruned", is the product.
    paths: ClassVar[Mapping[str, views.View]] = {"pruned": views.kept}
    #: False for a method that leaves every weight in place, so that no sparsity is asked of it.
    prunes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.require("sparsity", 0 <= self.sparsity < 1, "a fraction, at least 0 and below 1 (0.95 prunes 95 %)")
        self.require("steps", self.steps >= 1, "the number of optimizer steps, at least 1")
        self.require("ramp", 0 < self.ramp <= 1, "the part of the steps in which sparsity grows, above 0, at most 1")
        self.require("every", self.every >= 1, "a number of steps, at least 1")
        self.require("epoch_steps", self.epoch_steps >= 1, "a number of steps, at least 1 (1 = smooth)")

    def require(self, field: str, ok: bool, right: str) -> None:
        """The check of one setting; the message says what was given and what would be right."""
        if not ok:
            raise UserError(f"{type(self).__name__}: {field}={getattr(self, field)!r} cannot work; it is {right}")

    @property
    def target_step(self) -> int:
        """The step at which the sparsity asked for is reached."""
        return max(1, round(self.ramp * self.steps))

    def sparsity_at(self, step: int) -> float:
        """The scheduled sparsity after ``step`` optimizer steps."""
        return Cubic(self.sparsity, self.target_step, self.epoch_steps)(step)

    def due(self, step: int) -> bool:
        """Do the masks move after ``step`` steps? Not after the last one: the net would have no step to adapt."""
        return step == self.target_step or (step % self.every == 0 and step < self.steps)

    def start(self, layers: Sequence[Layer]) -> None:
        """Before the first step; the masks are all True."""

    def update(self, layers: Sequence[Layer], optimizer: Optimizer | None, step: int) -> None:
        """Move the masks, in place; called when ``due``."""
        fresh = select(layers, self.sparsity_at(step), self.criterion, self.granularity)
        for layer, mask in zip(layers, fresh, strict=True):
            layer.mask.copy_(mask)

    def after_step(self, layers: Sequence[Layer], optimizer: Optimizer | None, step: int) -> None:
        """After every optimizer step, before the masks move."""

    def loss(self, outputs: Mapping[str, Any], target: Any, task: Task, step: int) -> Tensor:
        """The sum of the task's loss over the paths; ``step`` counts the steps already taken."""
        return torch.stack([task(output, target) for output in outputs.values()]).sum()
