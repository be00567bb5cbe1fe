"""AutoPrune: automatic pruning by regularizing auxiliary parameters (Xiao, Wang & Rajasekaran, NeurIPS 2019)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from dcil.criteria import State
from dcil.granularity import Granularity, Weight
from dcil.method import Method, StepContext
from dcil.weight import PrunableWeight


@dataclass(frozen=True, kw_only=True)
class AutoPrune(Method):
    """Every weight has a trained indicator a; the network computes with w * h(a), h the unit step at a threshold.

        dL/dw = h(a) * dL/d(w h),     a <- a - rate * (sign(w) * softplus'(a) * dL/d(w h) + mu)

    rate    learning rate of the indicators
    mu      pull towards 0. With ``mu`` given the threshold is 0 and the sparsity is an outcome; None sets no pull,
            and the threshold follows the scheduled sparsity
    every   steps between mask updates

    No code was ever released: a re-implementation from the paper's description, with rate and mu as published
    (1.5e-2, 5e-2) and the start of the indicators, |w| over its layer's mean, chosen here. The original trains w and
    a on two halves of the data in turn; here every batch trains both. For one process and without a
    GradScaler: nobody averages, unscales or clears the gradients of the indicators. Protocol: the same, masks every 16.
    """

    rate: float = 1.5e-2
    mu: float | None = None
    every: int = 1

    granularities: ClassVar[tuple[type[Granularity], ...]] = (Weight,)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("rate", 0 < self.rate <= 1000, "> 0 and <= 1000", "the learning rate of the indicators")
        self.require("mu", self.mu is None or 0 <= self.mu <= 1000, "None, or >= 0 and <= 1000", "the pull towards 0")
        self.require("min_kept", self.mu is None or self.min_kept == 0, "0", "with mu, the indicators decide alone")

    def init_state(self, layers: Sequence[PrunableWeight], model: nn.Module) -> State:
        def start(layer: PrunableWeight) -> Tensor:
            size = layer.weight.detach().abs()
            return size / size.mean().clamp_min(torch.finfo(size.dtype).tiny)

        return super().init_state(layers, model) | {f"indicator.{layer.name}": start(layer) for layer in layers}

    def view(self, path: str, layer: PrunableWeight, state: State) -> Tensor:
        indicator = state[f"indicator.{layer.name}"].requires_grad_()
        smooth = nn.functional.softplus(indicator)
        # The second term is zero; its gradient is the indicator's.
        return layer.weight * layer.mask + layer.weight.detach().sign() * (smooth - smooth.detach())

    def after_step(self, context: StepContext) -> None:
        super().after_step(context)
        for layer in context.layers:
            indicator = context.state[f"indicator.{layer.name}"]
            if indicator.grad is not None:
                indicator.sub_(self.rate * (indicator.grad + (self.mu or 0.0)))
        for name, indicator in context.state.items():
            if name.startswith("indicator."):  # those of frozen layers, too
                indicator.grad = None

    def loss_key(self, step: int) -> Hashable:
        return ()

    def update(self, context: StepContext) -> None:
        if self.mu is None:
            super().update(context)
            return
        for layer in context.layers:
            layer.mask.copy_(context.state[f"indicator.{layer.name}"] > 0)

    def group_scores(self, layer: PrunableWeight, state: State) -> Tensor:
        return self.granularity.groups(layer, state[f"indicator.{layer.name}"].detach())

    def reads(self, layer: PrunableWeight, context: StepContext) -> list[Tensor]:
        return [*super().reads(layer, context), context.state[f"indicator.{layer.name}"].detach()]
