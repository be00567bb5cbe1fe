"""Method: frozen settings and a few hooks. A new method overrides one or two of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcil import views
from dcil.batch_share import targets_by_path
from dcil.criteria import Criterion, Magnitude, State
from dcil.declared import Selection, withdraw_keys
from dcil.granularity import Filter, Granularity, Weight
from dcil.schedule import Cubic, Phase, Schedule, Timeline, checked_step
from dcil.scope import Global, Scope
from dcil.selection import count_changes, select
from dcil.sharding import like
from dcil.task import Objective, Task
from dcil.validation import MOST, Validated
from dcil.weight import PrunableWeight


@dataclass(frozen=True)
class StepContext:
    """What the hooks of a method work on: live tensors, changed in place.

    layers      the prunable weights with their masks
    step        optimizer steps taken
    optimizer   the user's, where it was given
    state       tensors of the method and its criterion, by name; saved and resumed with the network
    model       the user's network
    """

    layers: Sequence[PrunableWeight]
    step: int
    optimizer: Optimizer | None
    state: State
    model: nn.Module


@dataclass(frozen=True, kw_only=True)
class Method(Validated):
    """Dynamic pruning by score: every F steps the masks are recomputed from all weights, pruned ones included.

    sparsity      fraction of the groups (weights, filters) that are pruned in the end
    steps         optimizer steps of the training; from then on the masks stay as they are
    finetune      further steps with these masks, at a constant learning rate
    ramp          part of ``steps`` after which ``sparsity`` is reached (the paper: epoch 225 of 300)
    every         F of the paper: steps from one mask update to the next; 0 is once per epoch
    epoch_steps   steps in an epoch, 1 if unknown
    smooth        let the sparsity grow with every step, not once per epoch as the authors do
    schedule      when the masks are updated, and how sparse they are then
    granularity   what is pruned as one group
    criterion     how a weight is scored
    scope         how the pruned groups are distributed over the layers
    stem, shortcuts, classifier   whether the first layer, the shortcut convolutions, the classifier are prunable too
    seed          of the method's own random choices
    begin         part of ``steps`` before the first mask update; the sparsity grows from there
    initial_sparsity   the sparsity that it grows from
    min_kept      groups that every layer keeps at least, whatever their scores
    """

    sparsity: float
    steps: int
    finetune: int = 0
    ramp: float = 0.75
    every: int = 16
    epoch_steps: int = 1
    smooth: bool = False
    schedule: Schedule = Cubic()
    granularity: Granularity = Weight()
    criterion: Criterion = Magnitude()
    scope: Scope = Global()
    stem: bool = True
    shortcuts: bool = True
    classifier: bool = False
    seed: int = 0
    begin: float = 0.0
    initial_sparsity: float = 0.0
    min_kept: int = 0

    #: Path name -> the view its layers see in training. The first path, "pruned", is the product.
    paths: ClassVar[Mapping[str, views.View]] = {"pruned": views.kept}
    #: False for a method that prunes no weight, so that no sparsity is asked of it.
    prunes: ClassVar[bool] = True
    #: True for a method that begins with masks of its own, so that none can be given to it.
    draws_masks: ClassVar[bool] = False
    #: True for a method with an ``added_gradient``.
    adds_gradient: ClassVar[bool] = False
    #: True for a method whose timeline has ``extra`` steps, whatever the settings.
    extra_steps: ClassVar[bool] = False
    #: False for a method whose sparsity does not grow, for which ``ramp`` means nothing.
    grows: ClassVar[bool] = True
    granularities: ClassVar[tuple[type[Granularity], ...]] = (Weight, Filter)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        withdraw_keys(cls)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in {"schedule": Schedule, "criterion": Criterion, "scope": Scope}.items():
            self.require(name, isinstance(getattr(self, name), kind), f"a {kind.__name__}", "an object, not its name")
            self.require(name, type(getattr(self, name)) is not kind, f"a kind of {kind.__name__}")
        known = self.extra_steps or not self.schedule.needs_extra or self.schedule == type(self).schedule
        self.require("schedule", known, "one with regular updates", "this method has no others; such as Cubic()")
        for name in ("steps", "finetune", "every", "epoch_steps", "min_kept"):
            self.require(name, getattr(self, name) <= MOST, f"<= {MOST}")
        self.require("seed", abs(self.seed) < 2**64, "less than 2**64", "64 bits")
        self.require("sparsity", 0 <= self.sparsity < 1, ">= 0 and < 1", "0.95 prunes 95 %")
        self.require("steps", self.steps >= 1, ">= 1", "optimizer steps of the training")
        self.require("finetune", self.finetune >= 0, ">= 0", "steps; 0 is no fine-tuning")
        self.require("ramp", 0 < self.ramp <= 1, "> 0 and <= 1", "the part of the steps in which the sparsity grows")
        self.require("every", self.every >= 0, ">= 0", "steps; 0 is once per epoch")
        self.require("epoch_steps", self.epoch_steps >= 1, ">= 1")
        end, called = (self.ramp, f"ramp, {self.ramp:g}") if self.grows else (1, "1")
        self.require("begin", 0 <= self.begin < end, f">= 0 and < {called}", "a part of the steps")
        known = 0 <= self.initial_sparsity <= self.sparsity
        self.require("initial_sparsity", known, f">= 0 and <= sparsity, {self.sparsity:g}")
        self.require("min_kept", self.min_kept >= 0, ">= 0", "groups of every layer; 0 lets a layer lose them all")
        names = " or ".join(f"{kind.__name__}()" for kind in self.granularities)
        self.require("granularity", isinstance(self.granularity, self.granularities), names, "for this method")
        most = self.granularity.max_sparsity
        self.require("sparsity", self.sparsity <= most, f"<= {most:g}", f"with {self.granularity}")
        self.require("schedule", self.schedule.peak <= most, f"one up to {most:g}", f"with {self.granularity}")

    # -- when the masks are updated ----------------------------------------------------------------------------------

    @property
    def period(self) -> int:
        """Steps between mask updates; a 200th of the training where once per epoch is asked for but no epoch known."""
        return self.every or (self.epoch_steps if self.epoch_steps > 1 else max(1, self.steps // 200))

    @property
    def target_step(self) -> int:
        """The step at which the final sparsity is reached."""
        return max(1, round(self.ramp * self.steps))

    @property
    def begin_step(self) -> int:
        """The step from which on the masks are updated and the sparsity grows."""
        return round(self.begin * self.steps)

    @property
    def timeline(self) -> Timeline:
        """The method's times in steps. No update after the last one: the network would have no step to adapt.

        The target step has an update of its own only where no regular one follows: else that one reaches the target.
        """
        target, last = self.target_step, self.steps - 1
        next_regular = -(-target // self.period) * self.period
        return Timeline(
            sparsity=self.sparsity,
            target=target,
            hold=1 if self.smooth else self.epoch_steps,
            every=self.period,
            begin=self.begin_step,
            initial=self.initial_sparsity,
            first=self.begin_step,
            last=last,
            extra=() if next_regular <= last else (target,),
            steps=self.steps,
            seed=self.seed,
        )

    @property
    def active_schedule(self) -> Schedule:
        """``schedule``, unless another setting chooses one."""
        return self.schedule

    def sparsity_at(self, step: int) -> float:
        """The scheduled sparsity after ``step`` optimizer steps."""
        return self.active_schedule.sparsity(checked_step(step), self.timeline)

    def due(self, step: int) -> bool:
        """Whether the masks are updated after ``step`` optimizer steps."""
        return self.active_schedule.due(checked_step(step), self.timeline)

    def phases(self) -> tuple[Phase, ...]:
        """Return the phases of training in order; the trainer sets the learning rate and the epochs by them."""
        train = Phase("train", self.steps)
        return (train, Phase("fine-tune", self.finetune, start=None)) if self.finetune else (train,)

    # -- how a mask is decided ---------------------------------------------------------------------------------------

    def update_masks(self, context: StepContext) -> Tensor:
        """Run ``update``; returns how many weights it (revived, dropped), still on the device."""
        before = [layer.mask.clone() for layer in context.layers]
        self.update(context)
        return count_changes(before, [layer.mask for layer in context.layers])

    def update(self, context: StepContext) -> None:
        """Recompute the masks, in place; called when ``due``."""
        layers = [layer for layer in context.layers if self.granularity.supports(layer)]
        scores = [self.group_scores(layer, context.state) for layer in layers]
        sparsity, most = self.sparsity_at(context.step), self.granularity.most_pruned
        kept = select(scores, sparsity, self.scope, layers, self.min_kept, most)
        for layer, groups in zip(layers, kept, strict=True):
            layer.mask.copy_(like(self.granularity.mask(layer, groups), layer.mask))

    def group_scores(self, layer: PrunableWeight, state: State) -> Tensor:
        """One score per group of the layer, 1-D."""
        return self.granularity.groups(layer, self.criterion.score(layer, state), self.criterion.power)

    # -- the other hooks ---------------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the network to train: the user's, unless the method needs other layers."""
        return model

    def is_prunable(self, name: str) -> bool:
        """Whether the weight called ``name`` is prunable by default, for methods that prune some layers only."""
        return True

    def init_state(self, layers: Sequence[PrunableWeight], model: nn.Module) -> State:
        """Create the tensors that the method keeps from step to step."""
        return self.criterion.init_state(layers)

    def start(self, context: StepContext) -> None:
        """Called before the first step; the masks are all True."""

    def reads(self, layer: PrunableWeight, context: StepContext) -> list[Tensor]:
        """The tensors that ``update`` reads: the weight first, then others, which must not be zero in every layer."""
        return [layer.weight.detach(), *self.criterion.reads(layer, context.state)]

    def share(self, path: str) -> float:
        """The part of each batch, its first samples, that ``path`` computes in training; the first path all of it."""
        return 1.0

    def view(self, path: str, layer: PrunableWeight, state: State) -> Tensor:
        """The tensor that a layer computes with on ``path``, in training."""
        return self.paths[path](layer.weight, layer.mask)

    def product(self, layer: PrunableWeight, state: State) -> Tensor:
        """The weight of the pruned net, zero where pruned: evaluation computes with it, ``finalize`` writes it."""
        return views.kept(layer.weight, layer.mask)

    def loss(self, outputs: Mapping[str, Any], target: Any, task: Task, step: int) -> Tensor:
        """Sum the task's loss over the paths; ``step`` counts the steps already taken."""
        task = Objective.of(task)
        shared = any(self.share(path) < 1 for path in outputs)
        targets = targets_by_path(outputs, target, task.logits) if shared else dict.fromkeys(outputs, target)
        losses = {path: task(output, targets[path]) for path, output in outputs.items()}
        task.parts.update({f"loss/{path}": loss.detach() for path, loss in losses.items()})
        return torch.stack(list(losses.values())).sum()

    def added_gradient(self, layer: PrunableWeight, state: State) -> Tensor:
        """What is added to the weight's gradient beside the loss's: a decay of its own, where ``adds_gradient``."""
        raise NotImplementedError("abstract: a method with adds_gradient defines added_gradient")

    def after_step(self, context: StepContext) -> None:
        """Called after every optimizer step, before a mask update: tensor operations in place and nothing else."""
        self.criterion.observe(context.layers, context.state)

    def notes(self, model: nn.Module) -> list[str]:
        """What a reader of the run's result should know."""
        return []

    # -- what an engine may record -----------------------------------------------------------------------------------
    # Steps with equal keys do the same computation on other tensors, so that it may be recorded once and replayed.
    # None: not to be recorded. A subclass that overrides a hook (see declared.py) without its key is not recorded.

    def loss_key(self, step: int) -> Hashable:
        """What ``view``, ``loss`` and ``after_step`` depend on besides their tensors."""
        return ()

    def view_key(self, path: str) -> views.View | None:
        """The elementwise view that ``view`` is on ``path``; None where it is more than that."""
        return self.paths[path]

    def update_key(self, step: int) -> Hashable:
        """What ``update`` depends on besides its tensors; None where it needs the host."""
        if not self.criterion.recordable:
            return None
        return Selection(self.sparsity_at(step), self.granularity, self.criterion, self.scope, self.min_kept)

    # -- where weights are sharded (FSDP2, tensor parallel) ----------------------------------------------------------

    def shards(self) -> bool:
        """Whether the hooks are right on sharded weights: nothing read back but through sharding.count_true."""
        return self.criterion.shards
