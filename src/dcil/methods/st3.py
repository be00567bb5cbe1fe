"""ST-3: straight-through gradients, soft thresholds (Vanderschueren & De Vleeschouwer, WACV 2023)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dcil.criteria import State
from dcil.methods.thresholded import Thresholded
from dcil.weight import PrunableWeight


@dataclass(frozen=True, kw_only=True)
class ST3(Thresholded):
    """The pruned net computes with soft-thresholded weights, each filter scaled up for what it lost; the gradient of
    these reaches all weights, straight through.

        w_P = M * c * (w - sign(w) t),    c = 1.01 / (0.01 + mean |M w| / mean |w|)  over the weights of a filter

    sigma    rank |w| sqrt(sum of the layer's dimensions), which spreads the pruned weights more evenly (ST-3 sigma)
    rescale  scale the filters, by c as it was at the last mask update; False is c = 1

    Original (github.com/vanderschuea/stthree): masks after every step; the sparsity grows with every step between
    epochs 5 and 80 of 160 and stays; gradients clipped at a norm of 3; all convolutions and the classifier.
    Protocol: the sparsity grows once per epoch from the first step, on the paper's prunable layers; masks and clipping
    as there.
    On the same tensors, threshold and scales equal the original's bit for bit, its weights but for the rounding of its
    w + (w_P - w). Its threshold lies between the largest weight pruned and the smallest kept; here it is the
    former, and exactly floor(s * n) weights are pruned.
    """

    begin: float = 5 / 160
    ramp: float = 0.5
    classifier: bool = True
    sigma: bool = False
    rescale: bool = True

    def unit(self, layer: PrunableWeight) -> float:
        return 1 / math.sqrt(sum(layer.weight.shape)) if self.sigma else 1.0

    def init_state(self, layers: Sequence[PrunableWeight], model: nn.Module) -> State:
        scales = {f"scale.{layer.name}": torch.ones_like(layer.rows(layer.magnitude)[:, :1]) for layer in layers}
        return super().init_state(layers, model) | (scales if self.rescale else {})

    def measure(self, layer: PrunableWeight, state: State) -> None:
        if self.rescale:
            size, mask = layer.rows(layer.magnitude), layer.rows(layer.mask)
            left = ((size * mask).mean(1, keepdim=True) + 1e-6) / (size.mean(1, keepdim=True) + 1e-6)
            state[f"scale.{layer.name}"].copy_(1.01 / (left + 0.01))

    def shrunk(self, layer: PrunableWeight, weight: Tensor, threshold: Tensor, state: State) -> Tensor:
        # Clamped for the weights that shrink below the threshold before the next mask update.
        soft = weight.sign() * (weight.abs() - threshold).clamp_min(0)
        if not self.rescale:
            return soft
        return layer.from_rows(layer.rows(soft) * state[f"scale.{layer.name}"].to(weight))
