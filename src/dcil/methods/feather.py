"""Feather: an elegant solution to effective DNN sparsification (Glentis Georgoulakis et al., BMVC 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dcil.criteria import State
from dcil.methods.thresholded import Thresholded
from dcil.weight import PrunableWeight


@dataclass(frozen=True, kw_only=True)
class Feather(Thresholded):
    """The pruned net computes with weights between hard and soft thresholds; pruned ones get a part of the gradient.

        w_P = M * sign(w) (|w|^p - t^p)^(1/p),    dL/dw = (M + (1 - M) theta) * dL/dw_P

    p       3: near the threshold a soft one, a hard one far above it
    theta   None is 1 up to 95 % sparsity and 0.5 above

    Original (github.com/athglentis/feather): the threshold at every step and after the last one; the sparsity grows
    with every step until half of the training; gradients clipped at a norm of 3; all convolutions and the classifier.
    Protocol: the sparsity grows once per epoch, on the paper's prunable layers; thresholds and clipping as there.
    On the same tensors and threshold, values equal the original's but for the rounding of t^p, gradients bit for bit.
    Its threshold lies between the largest weight pruned and the smallest kept; here it is the former, and exactly
    floor(s * n) weights are pruned.
    """

    ramp: float = 0.5
    classifier: bool = True
    p: float = 3.0
    theta: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("p", 1 <= self.p <= 4, "from 1 to 4", "1 is a soft threshold; the paper: 3")
        known = self.theta is None or 0 <= self.theta <= 1
        self.require("theta", known, "None, or from 0 to 1", "the part of the gradient that pruned weights get")

    @property
    def part(self) -> float:
        """Theta."""
        return self.theta if self.theta is not None else 0.5 if self.sparsity > 0.95 else 1.0

    def shrunk(self, layer: PrunableWeight, weight: Tensor, threshold: Tensor, state: State) -> Tensor:
        left = (weight.abs() ** self.p - threshold**self.p).clamp_min(0)
        return torch.where(threshold > 0, weight.sign() * left ** (1 / self.p), weight)  # exact where none is pruned

    def rule(self, layer: PrunableWeight) -> Tensor:
        return layer.weight if self.part == 1 else torch.where(layer.mask, layer.weight, self.part * layer.weight)
