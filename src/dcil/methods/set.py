"""SET: sparse evolutionary training (Mocanu, Mocanu, Stone, Nguyen, Gibescu & Liotta, 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dcil.method import StepContext
from dcil.methods.drop_and_grow import DropAndGrow, count_kept
from dcil.scope import ERK, Scope
from dcil.selection import largest_among


@dataclass(frozen=True, kw_only=True)
class SET(DropAndGrow):
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
        self.require("zeta", 0 <= self.zeta <= 1, ">= 0 and <= 1", "the fraction of weights to move")

    def survivors(self, context: StepContext) -> list[Tensor]:
        stay = []
        for layer in context.layers:
            w, kept = layer.weight.detach(), layer.mask.clone()
            sides = [layer.mask & (w > 0), layer.mask & (w < 0)]
            for side, number in zip(sides, count_kept(sides), strict=True):
                kept &= ~side | largest_among(side, w.abs(), number - int(self.zeta * number))
            stay.append(kept)
        return stay

    def grown(self, context: StepContext, stay: Sequence[Tensor]) -> list[Tensor]:
        had, left = count_kept([layer.mask for layer in context.layers]), count_kept(stay)
        places = zip(stay, self.noise(context), had, left, strict=True)
        return [largest_among(~kept, noise, old - new) for kept, noise, old, new in places]

    def shards(self) -> bool:
        return self.criterion.shards
