"""SM: sparse momentum (Dettmers & Zettlemoyer, 2019)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dcil import views
from dcil.method import StepContext
from dcil.methods.drop_and_grow import DropAndGrow, count_kept, largest_weights
from dcil.methods.zeroed import zero_pruned
from dcil.optimizer_state import momentum
from dcil.scope import Scope, Uniform, apportion
from dcil.selection import largest_among
from dcil.weight import PrunableWeight


@dataclass(frozen=True, kw_only=True)
class SM(DropAndGrow):
    """Per layer drop the fraction p of the smallest weights; share the free places among the layers by their mean
    momentum; grow where the momentum of an empty place is largest. New weights start at 0 and keep that momentum.

        share_l = mean |momentum| of the layer's weights / sum over layers
        grown_l = share_l * dropped, at most 0.99 of the layer's empty places, the rest spread evenly

    drop   p to begin with; it falls to ``drop_end`` along a cosine over the training

    Original: once per epoch, the same density everywhere, stem and classifier sparse too. Its rounding lets the
    density drift, which correction terms then chase; here the total is exact, so there is nothing to correct.
    Protocol: the same, on the paper's prunable layers.
    """

    every: int = 0
    drop: float = 0.5
    drop_end: float = 0.005
    scope: Scope = Uniform()
    classifier: bool = True

    # Dense gradients: the momentum of empty places is the growth signal.
    paths: ClassVar[Mapping[str, views.View]] = {"pruned": views.straight_through}
    clears_momentum: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("drop", 0 <= self.drop <= 1, ">= 0 and <= 1", "the fraction of weights to move at first")
        self.require("drop_end", 0 <= self.drop_end <= 1, ">= 0 and <= 1", "the fraction of weights to move at last")

    def drop_at(self, step: int) -> float:
        return self.drop_end + (self.drop - self.drop_end) / 2 * (1 + math.cos(math.pi * step / self.steps))

    def after_step(self, context: StepContext) -> None:
        self.criterion.observe(context.layers, context.state)
        zero_pruned(context, momentum=False)

    def loss_key(self, step: int) -> Hashable:
        return ()

    def counts(self, context: StepContext) -> tuple[list[float], list[int], list[int]]:
        """Each layer's share of the momentum, kept weights, and weights to drop."""
        directions = [momentum(context.optimizer, layer.weight).abs() for layer in context.layers]
        shares = momentum_shares(directions, [layer.mask for layer in context.layers])
        nnz, sizes = count_kept([layer.mask for layer in context.layers]), [w.weight.numel() for w in context.layers]
        layers = zip(shares, nnz, sizes, strict=True)
        return shares, nnz, [self.dropped(context.step, *layer, mean=1 / len(sizes)) for layer in layers]

    def survivors(self, context: StepContext) -> list[Tensor]:
        _, nnz, dropped = self.counts(context)
        layers = zip(context.layers, nnz, dropped, strict=True)
        return [largest_weights(layer, n - gone) for layer, n, gone in layers]

    def grown(self, context: StepContext, stay: Sequence[Tensor]) -> list[Tensor]:
        shares, nnz, dropped = self.counts(context)
        sizes = [layer.weight.numel() for layer in context.layers]
        empty = [size - n + gone for size, n, gone in zip(sizes, nnz, dropped, strict=True)]
        places = zip(context.layers, stay, redistribute(shares, empty, sum(dropped)), strict=True)
        return [
            largest_among(~kept, momentum(context.optimizer, layer.weight).abs(), count)
            for layer, kept, count in places
        ]

    def reads(self, layer: PrunableWeight, context: StepContext) -> list[Tensor]:
        return [*super().reads(layer, context), momentum(context.optimizer, layer.weight)]

    def dropped(self, step: int, share: float, nnz: int, size: int, mean: float) -> int:
        """ceil(p * nnz); a nearly dense layer with more than the mean share drops no more than it has empty."""
        rate, sparsity = self.drop_at(step), 1 - nnz / size
        if sparsity < 0.2 and share > mean:
            rate = min(sparsity, rate)
        return min(nnz, math.ceil(rate * nnz))


def momentum_shares(directions: Sequence[Tensor], masks: Sequence[Tensor]) -> list[float]:
    """Each layer's part of the mean momentum of active weights."""
    found = torch.stack(
        [((d * m).double() / m.sum().clamp_min(1)).sum() for d, m in zip(directions, masks, strict=True)]
    )
    means: list[float] = found.tolist()
    largest = max(max(means), 1e-300)  # relative to it, so that no sum overflows
    return [mean / largest / max(1.0, sum(other / largest for other in means)) for mean in means]


def redistribute(shares: Sequence[float], empty: Sequence[int], total: int) -> list[int]:
    """``total`` places by ``shares``, at most 0.99 of a layer's empty ones; the overflow spread evenly, exactly."""
    caps = [int(0.99 * places) for places in empty]
    if total > sum(caps):  # so little is empty that the cap cannot hold
        caps = list(empty)
    wanted = [share * total for share in shares]
    for _ in range(1000):
        overflow = sum(max(0.0, w - cap) for w, cap in zip(wanted, caps, strict=True))
        open_ = [i for i, (w, cap) in enumerate(zip(wanted, caps, strict=True)) if w < cap]
        wanted = [min(w, cap) for w, cap in zip(wanted, caps, strict=True)]
        if overflow < 1e-9 or not open_:
            break
        for i in open_:
            wanted[i] += overflow / len(open_)
    return apportion([w / cap if cap else 0.0 for w, cap in zip(wanted, caps, strict=True)], caps, total)
