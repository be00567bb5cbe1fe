"""Method: frozen settings and a few hooks. A new method overrides one or two of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcil import views
from dcil.criteria import Criterion, Magnitude, State
from dcil.errors import UserError
from dcil.granularity import Filter, Granularity, Weight
from dcil.schedule import Cubic
from dcil.scope import Global, Scope
from dcil.selection import changes, select
from dcil.weight import Layer

Task = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class StepContext:
    """What the hooks of a method work on: live tensors, changed in place.

    layers      the prunable weights with their masks
    step        optimizer steps taken
    optimizer   the user's, where it was given
    state       what the method and its criterion remember, by name; saved and resumed with the network
    model       the user's network
    """

    layers: Sequence[Layer]
    step: int
    optimizer: Optimizer | None
    state: State
    model: nn.Module


@dataclass(frozen=True)
class Phase:
    """A stretch of training. ``start`` is where in the learning-rate schedule it begins, None a constant rate."""

    name: str
    steps: int
    start: int | None = 0


@dataclass(frozen=True, kw_only=True)
class Method:
    """Dynamic pruning by score: every F steps the masks are recomputed from all weights, pruned ones included.

    sparsity      fraction of the groups (weights, filters) that are pruned in the end
    steps         optimizer steps of the training; from then on the masks stay as they are
    finetune      further steps with these masks, at a constant learning rate
    ramp          part of ``steps`` after which ``sparsity`` is reached (the paper: epoch 225 of 300)
    every         F of the paper: steps from one mask update to the next; 0 is once per epoch
    epoch_steps   steps in an epoch, 1 if unknown
    smooth        let the sparsity grow with every step, not once per epoch as the authors do
    granularity   what is pruned as one piece
    criterion     what a weight is worth
    scope         how the pruned groups are spread over the layers
    stem, shortcuts, classifier   are the first layer, the shortcut convolutions, the classifier prunable too
    seed          of the method's own random choices
    """

    sparsity: float
    steps: int
    finetune: int = 0
    ramp: float = 0.75
    every: int = 16
    epoch_steps: int = 1
    smooth: bool = False
    granularity: Granularity = Weight()
    criterion: Criterion = Magnitude()
    scope: Scope = Global()
    stem: bool = True
    shortcuts: bool = True
    classifier: bool = False
    seed: int = 0

    #: Path name -> the view its layers see in training. The first path, "pruned", is the product.
    paths: ClassVar[Mapping[str, views.View]] = {"pruned": views.kept}
    #: False for a method that leaves every weight in place, so that no sparsity is asked of it.
    prunes: ClassVar[bool] = True
    granularities: ClassVar[tuple[type[Granularity], ...]] = (Weight, Filter)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            self.require(field.name, not isinstance(value, float) or math.isfinite(value), "a finite number")
        self.require("sparsity", 0 <= self.sparsity < 1, "a fraction, at least 0 and below 1 (0.95 prunes 95 %)")
        self.require("steps", self.steps >= 1, "the number of optimizer steps, at least 1")
        self.require("finetune", self.finetune >= 0, "a number of steps, 0 (none) or more")
        self.require("ramp", 0 < self.ramp <= 1, "the part of the steps in which sparsity grows, above 0, at most 1")
        self.require("every", self.every >= 0, "a number of steps, at least 1, or 0 for once per epoch")
        self.require("epoch_steps", self.epoch_steps >= 1, "a number of steps, at least 1")
        names = " or ".join(f"{kind.__name__}()" for kind in self.granularities)
        self.require("granularity", isinstance(self.granularity, self.granularities), f"for this method {names}")
        most = self.granularity.most
        self.require("sparsity", self.sparsity <= most, f"with {self.granularity} at most {most:g}")

    def require(self, field: str, ok: bool, right: str) -> None:
        """The check of one setting; the message says what was given and what would be right."""
        if not ok:
            raise UserError(f"{type(self).__name__}: {field}={getattr(self, field)!r} cannot work; it is {right}")

    # -- when --------------------------------------------------------------------------------------------------------

    @property
    def period(self) -> int:
        """Steps between mask updates; a 200th of the training where once per epoch is asked for but no epoch known."""
        return self.every or (self.epoch_steps if self.epoch_steps > 1 else max(1, self.steps // 200))

    @property
    def target_step(self) -> int:
        """The step at which the sparsity asked for is reached."""
        return max(1, round(self.ramp * self.steps))

    def sparsity_at(self, step: int) -> float:
        """The scheduled sparsity after ``step`` optimizer steps."""
        return Cubic(self.sparsity, self.target_step, 1 if self.smooth else self.epoch_steps)(step)

    def due(self, step: int) -> bool:
        """Do the masks move after ``step`` steps? Not after the last one: the net would have no step to adapt."""
        return step == self.target_step or (step % self.period == 0 and step < self.steps)

    def phases(self) -> tuple[Phase, ...]:
        """What happens one after the other, for whoever sets the learning rate and counts the epochs."""
        train = Phase("train", self.steps)
        return (train, Phase("fine-tune", self.finetune, start=None)) if self.finetune else (train,)

    # -- what --------------------------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module) -> nn.Module:
        """The network to train: the user's, unless the method needs other layers."""
        return model

    def takes(self, name: str) -> bool:
        """Is the weight called ``name`` prunable, by default? For methods that treat some layers only."""
        return True

    def remember(self, layers: Sequence[Layer], model: nn.Module) -> State:
        """The tensors that the method keeps from step to step."""
        return self.criterion.start(layers)

    def start(self, now: StepContext) -> None:
        """Before the first step; the masks are all True."""

    def see(self, path: str, layer: Layer, state: State) -> Tensor:
        """The tensor that a layer computes with on ``path``, in training."""
        return self.paths[path](layer.weight, layer.mask)

    def loss(self, outputs: Mapping[str, Any], target: Any, task: Task, step: int) -> Tensor:
        """The sum of the task's loss over the paths; ``step`` counts the steps already taken."""
        return torch.stack([task(output, target) for output in outputs.values()]).sum()

    def after_step(self, now: StepContext) -> None:
        """After every optimizer step, before the masks move: tensor operations in place and nothing else."""
        self.criterion.observe(now.layers, now.state)

    def update(self, now: StepContext) -> None:
        """Move the masks, in place; called when ``due``."""
        layers = [layer for layer in now.layers if self.granularity.fits(layer)]
        scores = [self.group_scores(layer, now.state) for layer in layers]
        kept = select(scores, self.sparsity_at(now.step), self.scope, layers)
        for layer, groups in zip(layers, kept, strict=True):
            layer.mask.copy_(self.granularity.mask(layer, groups))

    def move_masks(self, now: StepContext) -> Tensor:
        """``update``, and how many weights it (revived, dropped), still on the device."""
        before = [layer.mask.clone() for layer in now.layers]
        self.update(now)
        return changes(before, [layer.mask for layer in now.layers])

    def group_scores(self, layer: Layer, state: State) -> Tensor:
        """One score per group of the layer, 1-D."""
        return self.granularity.groups(layer, self.criterion.score(layer, state))

    def notes(self, model: nn.Module) -> list[str]:
        """What somebody who reads the result of a run should know."""
        return []

    def form(self, step: int) -> Hashable:
        """What ``loss``, ``see`` and ``after_step`` depend on besides their tensors: equal forms do the same
        computation, so that an engine may record it once and replay it."""
        return None

    def update_form(self, step: int) -> Hashable:
        """As ``form``, for ``update``; None where more counts: random numbers, values read from the device."""
        return self.sparsity_at(step) if type(self).update is Method.update and self.scores_on_device else None

    @property
    def scores_on_device(self) -> bool:
        """Are the scores made of tensor operations alone? A method that makes its own may need the host."""
        return type(self).group_scores is Method.group_scores and self.criterion.recordable
