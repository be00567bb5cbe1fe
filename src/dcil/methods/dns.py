"""DNS: dynamic network surgery (Guo, Yao & Chen, NeurIPS 2016)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from dcil import views
from dcil.criteria import State
from dcil.granularity import Granularity, Weight
from dcil.method import Method, StepContext
from dcil.schedule import Constant, Cubic, Schedule, Thinned, Timeline
from dcil.scope import Scope, Uniform
from dcil.weight import PrunableWeight


@dataclass(frozen=True, kw_only=True)
class DNS(Method):
    """Weights below a threshold are cut, cut weights above a higher one are spliced back; all of them train, straight
    through the mask.

        cut if |w| <= 0.9 t,    spliced if |w| > 1.1 t,    else as before
        at a step with probability (1 + gamma * steps since the surgery began)^-power

    c         threshold t = mean + c * std of a layer's |w| when the surgery begins, so that the sparsity is an
              outcome; None solves t at every update for the scheduled sparsity instead, hysteresis included
    begin     part of ``steps`` of dense training before the surgery
    until     part of ``steps`` after which the masks stay
    gradual   let the sparsity grow along the schedule; the original cuts at once

    Original: from a trained network, c given, layer by layer. Protocol: gradual from the first step, every 16.
    """

    c: float | None = None
    begin: float = 0.25
    until: float = 0.75
    gamma: float = 1e-3
    power: float = 1.0
    every: int = 1
    gradual: bool = False
    scope: Scope = Uniform()
    schedule: Schedule = Constant()

    paths: ClassVar[Mapping[str, views.View]] = {"pruned": views.straight_through}
    extra_steps: ClassVar[bool] = True
    granularities: ClassVar[tuple[type[Granularity], ...]] = (Weight,)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("begin", 0 <= self.begin < 1, ">= 0 and < 1", "a part of the steps")
        self.require("min_kept", self.c is None or self.min_kept == 0, "0", "with c, the thresholds decide alone")
        self.require("until", self.begin < self.until <= 1, "> begin and <= 1", "a part of the steps")
        self.require("c", self.c is None or abs(self.c) <= 1000, "None, or from -1000 to 1000", "standard deviations")
        self.require("gamma", self.gamma >= 0, ">= 0", "0 updates the masks at every step")
        self.require("power", self.power >= 0, ">= 0", "0 updates the masks at every step")

    @property
    def first(self) -> int:
        """The step of the first surgery."""
        return max(1, round(self.begin * self.steps))

    @property
    def timeline(self) -> Timeline:
        last = max(self.first, round(self.until * self.steps))
        return replace(super().timeline, begin=0, first=self.first, last=last, extra=(last,))  # a ramp from step 0

    @property
    def active_schedule(self) -> Schedule:
        return Thinned(Cubic() if self.gradual else self.schedule, self.gamma, self.power)

    def init_state(self, layers: Sequence[PrunableWeight], model: nn.Module) -> State:
        thresholds = {f"threshold.{layer.name}": torch.full((), torch.nan) for layer in layers}
        return super().init_state(layers, model) | ({} if self.c is None else thresholds)

    def update(self, context: StepContext) -> None:
        if self.c is None:
            super().update(context)
            return
        for layer in context.layers:
            size = layer.weight.detach().abs()
            threshold = context.state[f"threshold.{layer.name}"]
            fresh = (size.mean() + self.c * size.std(correction=0)).clamp_min(0)
            threshold.copy_(torch.where(threshold.isnan(), fresh, threshold))  # fixed from the first time on
            cut, splice = size <= 0.9 * threshold, size > 1.1 * threshold
            layer.mask.copy_((layer.mask & ~cut) | splice)

    def group_scores(self, layer: PrunableWeight, state: State) -> Tensor:
        """|w| / 0.9 where kept, |w| / 1.1 where cut: exactly the weights with a score up to t are cut by t."""
        size = layer.magnitude
        return self.granularity.groups(layer, torch.where(layer.mask, size / 0.9, size / 1.1))

    def shards(self) -> bool:
        return self.criterion.shards and self.c is None  # the mean of a layer's weights is not elementwise
