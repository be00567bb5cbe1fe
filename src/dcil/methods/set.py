"""SET: sparse evolutionary training (Mocanu, Mocanu, Stone, Nguyen, Gibescu & Liotta, 2018)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dcil.method import StepContext
from dcil.methods.sparse_start import SparseStart, nnz_of
from dcil.methods.zeroed import zero_pruned
from dcil.scope import ERK, Scope
from dcil.selection import largest_among
from dcil.weight import Layer


@dataclass(frozen=True, kw_only=True)
class SET(SparseStart):
    """Per layer: drop the fraction zeta of the positive weights nearest 0 and of the negative ones nearest 0, then
    grow as many at random empty places, those just left included. New weights start at 0, without momentum.

    zeta   fraction to move

    Original: once per epoch, ER (here its kernel form, as everybody uses for convolutions), output layer dense.
    Protocol: the same, on the paper's prunable layers.
    """

    every: int = 0
    zeta: float = 0.3
    scope: Scope = ERK()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("zeta", 0 <= self.zeta <= 1, "the fraction of weights to move, from 0 to 1")

    def update(self, now: StepContext) -> None:
        had = nnz_of(now.layers)
        for layer in now.layers:
            layer.mask.logical_and_(self.surviving(layer))
        zero_pruned(now)  # a weight that returns to its own place is a new one, too
        left = nnz_of(now.layers)
        for layer, noise, old, new in zip(now.layers, self.noise(now), had, left, strict=True):
            layer.mask.logical_or_(largest_among(~layer.mask, noise, old - new))

    def surviving(self, layer: Layer) -> Tensor:
        """All but the fraction zeta nearest 0 on each side."""
        w = layer.weight.detach()
        kept = torch.ones_like(layer.mask)
        for side in (layer.mask & (w > 0), layer.mask & (w < 0)):
            number = int(side.sum())
            kept &= ~side | largest_among(side, w.abs(), number - int(self.zeta * number))
        return kept
