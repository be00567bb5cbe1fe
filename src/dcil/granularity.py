"""Granularities: what is pruned as one piece. Scores per weight -> scores per group; kept groups -> mask.

Both directions speak of one layer; masks.py selects across layers in between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dcil.errors import UserError
from dcil.weight import Layer


@dataclass(frozen=True)
class Granularity:
    """How the weights of a layer fall into groups that live and die together."""

    @property
    def most(self) -> float:
        """No more than this part of the groups can be pruned."""
        return 1.0

    def fits(self, layer: Layer) -> bool:
        """Can the layer be pruned like this? Otherwise it stays dense."""
        return True

    def groups(self, layer: Layer, scores: Tensor) -> Tensor:
        """Scores of the weight's shape -> one score per group, 1-D."""
        raise NotImplementedError("abstract: a granularity defines groups")

    def mask(self, layer: Layer, kept: Tensor) -> Tensor:
        """One bool per group -> a mask of the weight's shape."""
        raise NotImplementedError("abstract: a granularity defines mask")

    def dead(self, layer: Layer) -> tuple[int, int]:
        """How many groups of the layer are pruned, and how many it has (waits for the device)."""
        alive = layer.rows(layer.mask).flatten()
        return int((~alive).sum()), alive.numel()


@dataclass(frozen=True)
class Weight(Granularity):
    """Single weights: unstructured pruning."""

    def groups(self, layer: Layer, scores: Tensor) -> Tensor:
        return layer.rows(scores).flatten()

    def mask(self, layer: Layer, kept: Tensor) -> Tensor:
        return layer.fold(kept)


@dataclass(frozen=True)
class Filter(Granularity):
    """Whole output filters (rows of a Linear), each scored by the mean of its weights' scores."""

    def groups(self, layer: Layer, scores: Tensor) -> Tensor:
        # Summed in double so that the order of summation, which differs by device, cannot change the ranking.
        return layer.rows(scores).double().mean(dim=1).float()

    def mask(self, layer: Layer, kept: Tensor) -> Tensor:
        return layer.fold(kept[:, None].expand_as(layer.rows(layer.mask)))

    def dead(self, layer: Layer) -> tuple[int, int]:
        alive = layer.rows(layer.mask).any(1)
        return int((~alive).sum()), alive.numel()


@dataclass(frozen=True)
class NM(Granularity):
    """N:M sparsity: of every ``m`` weights that follow each other along the input channels, ``n`` stay.

    A weight may go only if it is among the m - n smallest of its m, so a layer is N:M, or on the way there, at any
    sparsity up to 1 - n / m; of equal ones the first stays. A layer whose input channels m does not divide stays dense.
    """

    n: int = 2
    m: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.n < self.m:
            raise UserError(f"{self.n}:{self.m} is no N:M sparsity: it takes 0 < N < M, as in 2:4")

    @property
    def most(self) -> float:
        return 1 - self.n / self.m

    def fits(self, layer: Layer) -> bool:
        return not layer.transposed and layer.weight.shape[1] % self.m == 0

    def groups(self, layer: Layer, scores: Tensor) -> Tensor:
        along = scores.movedim(1, -1).reshape(-1, self.m)
        order = along.argsort(dim=1, descending=True, stable=True)
        safe = torch.zeros_like(along, dtype=torch.bool).scatter_(1, order[:, : self.n], True)
        return along.masked_fill(safe, torch.inf).flatten()

    def mask(self, layer: Layer, kept: Tensor) -> Tensor:
        shape = layer.weight.movedim(1, -1).shape
        return kept.reshape(shape).movedim(-1, 1)
