"""DSR: dynamic sparse reparameterization (Mostafa & Wang, ICML 2019)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from dcil.criteria import State
from dcil.method import StepContext
from dcil.methods.drop_and_grow import DropAndGrow, count_kept, largest_weights
from dcil.schedule import Schedule, Stretched
from dcil.scope import Scope, Uniform, apportion
from dcil.selection import largest_among
from dcil.weight import PrunableWeight


@dataclass(frozen=True, kw_only=True)
class DSR(DropAndGrow):
    """One threshold for all layers drops the small weights; the free places go to layers in proportion to what they
    have left, at random positions that were not just dropped. New weights start at 0, with their stale momentum.

        K dropped > 1.1 N:  threshold / 2;      K < 0.9 N:  threshold * 2

    move        N as a fraction of the prunable weights (20,000 of WRN-28-2's 1.46 million), at most half of the kept
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
    schedule: Schedule = Stretched(doublings=(0.125, 0.4, 0.7))

    clears_momentum: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("move", 0 < self.move < 1, "> 0 and < 1", "the fraction of weights to move")
        self.require("threshold", 1e-12 <= self.threshold <= 1e12, "from 1e-12 to 1e12", "the size of small weights")

    def init_state(self, layers: Sequence[PrunableWeight], model: nn.Module) -> State:
        return super().init_state(layers, model) | {"threshold": torch.tensor(self.threshold, dtype=torch.double)}

    def after_step(self, context: StepContext) -> None:
        """Nothing but the criterion: the mask hides what momentum does to pruned weights until the next event."""
        self.criterion.observe(context.layers, context.state)

    def loss_key(self, step: int) -> Hashable:
        return ()

    def survivors(self, context: StepContext) -> list[Tensor]:
        threshold, stay = context.state["threshold"], []
        for layer in context.layers:
            magnitude = layer.weight.detach().abs()
            survivor = largest_weights(layer, 1)  # no layer loses everything
            stay.append(layer.mask & ((magnitude >= threshold.to(magnitude)) | survivor))
        had = sum(count_kept([layer.mask for layer in context.layers]))
        # Where N could never be reached the threshold would double without end, and every update take everything.
        wanted = min(self.move * sum(kept.numel() for kept in stay), 0.5 * had)
        threshold.mul_(self.factor(had - sum(count_kept(stay)), wanted))
        return stay

    def grown(self, context: StepContext, stay: Sequence[Tensor]) -> list[Tensor]:
        had, left = count_kept([layer.mask for layer in context.layers]), count_kept(stay)
        dropped, taken, count = sum(had) - sum(left), [layer.mask for layer in context.layers], had
        if dropped > sum(mask.numel() for mask in taken) - sum(had):  # so little is empty: those just dropped, too
            taken, count = list(stay), left
        room = [mask.numel() - n for mask, n in zip(taken, count, strict=True)]
        places = zip(taken, self.noise(context), spread(left, room, dropped), strict=True)
        return [largest_among(~mask, noise, n) for mask, noise, n in places]

    def factor(self, dropped: int, wanted: float) -> float:
        if dropped > 1.1 * wanted:
            return 0.5
        return 2.0 if dropped < 0.9 * wanted else 1.0


def spread(left: Sequence[int], room: Sequence[int], total: int) -> list[int]:
    """``total`` places in proportion to ``left``, what does not fit into the ``room`` of a layer offered again."""
    grow = [0] * len(left)
    while rest := min(total, sum(room)) - sum(grow):  # ends: every round places all, or fills a layer
        open_ = [i for i in range(len(left)) if grow[i] < room[i]]
        open_ = [i for i in open_ if left[i]] or open_
        sizes = [left[i] or 1 for i in open_]
        if rest < sum(sizes):
            more = apportion([rest / sum(sizes)] * len(open_), sizes, rest)
        else:  # every layer as often as it has left, until the first is full
            filled = min(-(-(room[i] - grow[i]) // size) for i, size in zip(open_, sizes, strict=True))
            more = [size * min(rest // sum(sizes), filled) for size in sizes]
        for i, n in zip(open_, more, strict=True):
            grow[i] = min(room[i], grow[i] + n)
    return grow
