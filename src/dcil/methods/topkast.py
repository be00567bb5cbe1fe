"""Top-KAST: top-K always sparse training (Jayakumar, Pascanu, Rae, Osindero & Elsen, NeurIPS 2020)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from dcil import views
from dcil.criteria import Magnitude, State
from dcil.granularity import Granularity, Weight
from dcil.method import Method, StepContext
from dcil.schedule import Constant, Schedule
from dcil.scope import Scope, Uniform
from dcil.selection import select
from dcil.weight import PrunableWeight


@dataclass(frozen=True, kw_only=True)
class TopKAST(Method):
    """The pruned net computes with the largest weights A; its gradient reaches a larger set B of the next largest, too,
    which decay faster, so that they either grow into A or make room for others.

        w_P = M_A w,    dL/dw = M_B * dL/dw_P + penalty / D * (M_B - M_A) w,    D the density of A

    backward   sparsity of B; None lets B have twice as many weights as A
    penalty    of the weights in B alone; those in A have the optimizer's weight decay

    Original, from the paper: A and B are each layer's largest weights, from the first step on and of constant size,
    chosen anew at every step or every 100; the penalty is the L2 norm of A, and that of B without A over D; first
    and last layer dense; what is outside of B is neither trained nor penalised. Here the optimizer's decay and what is
    left of its momentum move that too: take weight_decay=0 for the former.
    Protocol: every 100, on the paper's prunable layers.
    Unverified: no code of the authors was found. Two public ones (SparseML, github.com/A-Klass/torch_topkast) agree
    on A, B and gradients, but not on the penalty: the former divides by the sparsity of A, the latter by D.
    """

    every: int = 100
    backward: float | None = None
    penalty: float = 1e-4
    schedule: Schedule = Constant()
    scope: Scope = Uniform()
    stem: bool = False

    granularities: ClassVar[tuple[type[Granularity], ...]] = (Weight,)
    adds_gradient: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.backward is None or 0 <= self.backward <= self.sparsity
        self.require("backward", known, f"None, or from 0 to sparsity, {self.sparsity:g}", "the sparsity of B")
        self.require("penalty", 0 <= self.penalty <= 1, ">= 0 and <= 1", "a weight decay")

    def backward_at(self, step: int) -> float:
        """The sparsity of B: its part of that of A, which may grow."""
        sparsity = self.sparsity_at(step)
        if self.backward is None:
            return max(0.0, 2 * sparsity - 1)
        return sparsity / self.sparsity * self.backward if self.sparsity else 0.0

    def init_state(self, layers: Sequence[PrunableWeight], model: nn.Module) -> State:
        trained = {f"trained.{layer.name}": torch.ones_like(layer.mask) for layer in layers}
        return super().init_state(layers, model) | trained

    def start(self, context: StepContext) -> None:
        if isinstance(self.criterion, Magnitude):  # others rank gradients, of which there are none yet
            self.update(context)

    def view(self, path: str, layer: PrunableWeight, state: State) -> Tensor:
        return torch.where(state[f"trained.{layer.name}"], views.straight_through(layer.weight, layer.mask), 0)

    def added_gradient(self, layer: PrunableWeight, state: State) -> Tensor:
        explored = state[f"trained.{layer.name}"] & ~layer.mask
        return self.penalty / (1 - self.sparsity) * layer.weight.detach() * explored

    def update(self, context: StepContext) -> None:
        super().update(context)
        scores = [self.group_scores(layer, context.state) for layer in context.layers]
        kept = select(scores, self.backward_at(context.step), self.scope, context.layers, self.min_kept)
        for layer, groups in zip(context.layers, kept, strict=True):
            context.state[f"trained.{layer.name}"].copy_(layer.mask | self.granularity.mask(layer, groups))

    # Both sets are tensors that are changed in place, and nothing is read back.
    def loss_key(self, step: int) -> Hashable:
        return ()

    def update_key(self, step: int) -> Hashable:
        selection = super().update_key(step)
        return None if selection is None else ("top-kast", selection, self.backward_at(step))
