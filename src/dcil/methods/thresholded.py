"""Thresholded: the pruned net shrinks the weights that it keeps by what was pruned, so that no weight jumps to zero."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from dcil.criteria import Magnitude, State
from dcil.gradient_rules import carry
from dcil.granularity import Granularity, Weight
from dcil.method import Method, StepContext
from dcil.schedule import Timeline
from dcil.scope import Global
from dcil.weight import PrunableWeight, wide


@dataclass(frozen=True, kw_only=True)
class Thresholded(Method):
    """The pruned net computes with M * f(w, t), t being the largest |w| that the last mask update pruned.

    A method says what f is (``shrunk``) and which gradient reaches the weights (``rule``). t is one number for all
    layers: a tensor of the method's state beside the masks. A kept weight that is below it by the next update
    contributes nothing until then.
    """

    every: int = 1

    granularities: ClassVar[tuple[type[Granularity], ...]] = (Weight,)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("criterion", isinstance(self.criterion, Magnitude), "Magnitude()", "the threshold is one of |w|")
        self.require("scope", isinstance(self.scope, Global), "Global()", "one threshold for all layers")
        self.require("min_kept", self.min_kept == 0, "0", "the threshold decides alone")

    @property
    def timeline(self) -> Timeline:
        """As of every method, but the last step has an update too, also where ``every`` does not divide the steps.

        What ``finalize`` writes has the threshold and the masks of the weights that it is made of.
        """
        regular = super().timeline
        return replace(regular, extra=(*regular.extra, self.steps))

    def shrunk(self, layer: PrunableWeight, weight: Tensor, threshold: Tensor, state: State) -> Tensor:
        """f: what the pruned net has in place of the kept entries of ``weight``, given in float32 or wider."""
        raise NotImplementedError("abstract: a thresholded method defines shrunk")

    def measure(self, layer: PrunableWeight, state: State) -> None:
        """Called when a layer has a new mask: set the method's tensors that stay as they are until the next one."""

    def rule(self, layer: PrunableWeight) -> Tensor:
        """A tensor made of the weight, with the gradient that the weight gets."""
        return layer.weight

    def unit(self, layer: PrunableWeight) -> float:
        """What the layer's |w| is measured in, where layers are ranked together."""
        return 1.0

    def init_state(self, layers: Sequence[PrunableWeight], model: nn.Module) -> State:
        threshold = torch.zeros((), device=layers[0].weight.device)
        return super().init_state(layers, model) | {"threshold": threshold}

    def product(self, layer: PrunableWeight, state: State) -> Tensor:
        weight = wide(layer.weight.detach())
        seen = self.shrunk(layer, weight, state["threshold"].to(weight) * self.unit(layer), state)
        return torch.where(layer.mask, seen, 0).to(layer.weight.dtype)

    def view(self, path: str, layer: PrunableWeight, state: State) -> Tensor:
        return carry(self.product(layer, state), self.rule(layer))

    def group_scores(self, layer: PrunableWeight, state: State) -> Tensor:
        return self.granularity.groups(layer, layer.magnitude / self.unit(layer))

    def update(self, context: StepContext) -> None:
        super().update(context)
        pruned = [(layer.magnitude / self.unit(layer)).masked_fill(layer.mask, 0).amax() for layer in context.layers]
        context.state["threshold"].copy_(torch.stack(pruned).amax())
        for layer in context.layers:
            self.measure(layer, context.state)

    # The state's tensors are changed in place, and nothing is read back.
    def loss_key(self, step: int) -> Hashable:
        return ()

    def update_key(self, step: int) -> Hashable:
        selection = super().update_key(step)
        return None if selection is None else ("thresholded", selection)
