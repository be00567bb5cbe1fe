"""Rewinding: prune, then train again from an earlier point (Renda, Frankle & Carbin, ICLR 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from dcil.criteria import State
from dcil.method import StepContext
from dcil.methods.zeroed import Zeroed, zero_pruned
from dcil.optimizer_state import reset_state
from dcil.schedule import AtSteps, Phase, Schedule, Timeline
from dcil.weight import PrunableWeight


@dataclass(frozen=True, kw_only=True)
class Rewind(Zeroed):
    """Train to the end, prune by magnitude, set the learning rate back to an earlier point, train to the end again.

        after round r of R:   density = (1 - sparsity)^(r / R);     a round costs steps * (1 - to) more steps

    to        the point to go back to, as a part of ``steps``
    weights   go back to the weights of that point too (the lottery ticket's way); by default only the learning rate
    rounds    prune and retrain this often

    ``steps`` is one training; the whole run takes steps * (1 + rounds * (1 - to)), as its summary states.
    Original: one ranking across all layers, classifier sparse too, momentum starts empty after each pruning.
    Protocol: the paper's prunable layers; the extra epochs stay, they are the method.
    """

    to: float = 0.1
    weights: bool = False
    rounds: int = 1
    schedule: Schedule = AtSteps()
    classifier: bool = True

    extra_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("to", 0 <= self.to < 1, ">= 0 and < 1", "a part of the steps")
        self.require("rounds", 1 <= self.rounds <= 1000, "from 1 to 1000")
        known = self.rounds % 2 == 1 or not self.schedule.alternates
        self.require("rounds", known, "odd with a schedule that alternates", "an even number ends dense")

    @property
    def back(self) -> int:
        """The step that training goes back to: the end of an epoch, so that all rounds are whole epochs."""
        return round(self.to * (self.steps / self.epoch_steps)) * self.epoch_steps

    @property
    def prunings(self) -> list[int]:
        """The steps after which weights are pruned."""
        return [self.steps + r * (self.steps - self.back) for r in range(self.rounds)]

    @property
    def timeline(self) -> Timeline:
        return replace(super().timeline, extra=tuple(self.prunings))

    def phases(self) -> tuple[Phase, ...]:
        again = [Phase("retrain", self.steps - self.back, start=self.back)] * self.rounds
        extra = [Phase("fine-tune", self.finetune, None)] if self.finetune else []
        return (Phase("train", self.steps), *again, *extra)

    def init_state(self, layers: Sequence[PrunableWeight], model: nn.Module) -> State:
        early = {f"early.{name}": tensor.clone() for name, tensor in model.state_dict().items()} if self.weights else {}
        return super().init_state(layers, model) | early

    def after_step(self, context: StepContext) -> None:
        super().after_step(context)
        if self.weights and context.step == self.back:
            for name, tensor in context.model.state_dict().items():
                context.state[f"early.{name}"].copy_(tensor)

    def loss_key(self, step: int) -> bool:
        return self.weights and step + 1 == self.back  # the one step that copies the weights

    def update(self, context: StepContext) -> None:
        super().update(context)
        if self.weights:
            for name, tensor in context.model.state_dict().items():
                tensor.copy_(context.state[f"early.{name}"])
        zero_pruned(context)
        reset_state(context.optimizer, context.model)

    def shards(self) -> bool:
        return self.criterion.shards and not self.weights
