"""DSR: dynamic sparse reparameterization (Mostafa & Wang, ICML 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dcil.criteria import State
from dcil.method import StepContext
from dcil.methods.sparse_start import SparseStart, nnz_of
from dcil.methods.zeroed import zero_pruned
from dcil.scope import Scope, Uniform, counts
from dcil.selection import largest_among
from dcil.weight import Layer


@dataclass(frozen=True, kw_only=True)
class DSR(SparseStart):
    """One threshold for all layers drops the small weights; the free places go to layers in proportion to what they
    have left, at random positions that were not just dropped. New weights start at 0, with their stale momentum.

        K dropped > 1.1 N:  threshold / 2;      K < 0.9 N:  threshold * 2

    move        N as a fraction of the prunable weights (20,000 of WRN-28-2's 1.46 million)
    threshold   to begin with

    Original: every 100 iterations, 200 from an eighth of the training on, 400 from 0.4, 800 from 0.7, never in the
    last twentieth; stem, shortcuts and classifier dense. Protocol: the same, on the paper's prunable layers.
    """

    every: int = 100
    until: float = 0.95
    move: float = 20_000 / 1_462_704
    threshold: float = 1e-3
    scope: Scope = Uniform()
    stem: bool = False
    shortcuts: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("move", 0 < self.move < 1, "the fraction of weights to move, above 0 and below 1")
        self.require("threshold", self.threshold > 0, "above 0")

    def due(self, step: int) -> bool:
        stretch = 2 ** sum(step >= part * self.steps for part in (0.125, 0.4, 0.7))
        return super().due(step) and step % (self.period * stretch) == 0

    def remember(self, layers: Sequence[Layer], model: nn.Module) -> State:
        return super().remember(layers, model) | {"threshold": torch.tensor(self.threshold, dtype=torch.double)}

    def after_step(self, now: StepContext) -> None:
        """Nothing but the criterion: the mask hides what momentum does to pruned weights until the next event."""
        self.criterion.observe(now.layers, now.state)

    def update(self, now: StepContext) -> None:
        threshold = now.state["threshold"]
        before = [layer.mask.clone() for layer in now.layers]
        had = nnz_of(now.layers)
        for layer in now.layers:
            magnitude = layer.weight.detach().abs()
            survivor = largest_among(layer.mask, magnitude, 1)  # no layer loses everything
            layer.mask.logical_and_((magnitude >= threshold.to(magnitude)) | survivor)
        left = nnz_of(now.layers)
        dropped = sum(had) - sum(left)
        threshold.mul_(self.factor(dropped, self.move * sum(old.numel() for old in before)))
        zero_pruned(now, momentum=False)
        room = [int((~old).sum()) for old in before]
        grow = spread(left, room, dropped)
        for layer, old, noise, n in zip(now.layers, before, self.noise(now), grow, strict=True):
            layer.mask.logical_or_(largest_among(~old, noise, n))

    def factor(self, dropped: int, wanted: float) -> float:
        if dropped > 1.1 * wanted:
            return 0.5
        return 2.0 if dropped < 0.9 * wanted else 1.0


def spread(left: Sequence[int], room: Sequence[int], total: int) -> list[int]:
    """``total`` places in proportion to ``left``, what does not fit into the ``room`` of a layer offered again."""
    grow = [0] * len(left)
    while total > sum(grow):
        open_ = [i for i in range(len(left)) if grow[i] < room[i]]
        if not open_:
            raise RuntimeError("more weights were dropped than there are places for")
        share = (total - sum(grow)) / sum(left[i] for i in open_)
        more = counts(
            [share] * len(open_), [left[i] for i in open_], min(total - sum(grow), sum(left[i] for i in open_))
        )
        for i, n in zip(open_, more, strict=True):
            grow[i] = min(room[i], grow[i] + n)
    return grow
