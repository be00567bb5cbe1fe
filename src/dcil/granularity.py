"""Granularities: what is pruned as one group. Weight scores -> group scores; kept groups -> mask.

Both directions are about one layer; selection.py selects across layers in between. Where the scores are sharded and
a group is a single weight, they stay as they are, in the weight's shape; groups that the shards may cut through are
computed from a layer's gathered scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dcil.errors import UserError
from dcil.sharding import count_true, is_sharded, like, whole
from dcil.validation import Validated
from dcil.weight import PrunableWeight


@dataclass(frozen=True)
class Granularity(Validated):
    """Divides the weights of a layer into groups that are pruned together."""

    @property
    def max_sparsity(self) -> float:
        """The largest part of the groups that can be pruned."""
        return 1.0

    def most_pruned(self, groups: int) -> int:
        """How many of a layer's groups can be pruned, whatever its share of the sparsity."""
        return groups

    def supports(self, layer: PrunableWeight) -> bool:
        """Whether the layer can be pruned in these groups; otherwise it stays dense."""
        return True

    def groups(self, layer: PrunableWeight, scores: Tensor, power: int = 1) -> Tensor:
        """Scores of the weight's shape -> their power mean in each group: 1-D, or sharded in the weight's shape."""
        raise NotImplementedError("abstract: a granularity defines groups")

    def mask(self, layer: PrunableWeight, kept: Tensor) -> Tensor:
        """One bool per group -> a mask of the weight's shape."""
        raise NotImplementedError("abstract: a granularity defines mask")

    def count_pruned(self, layer: PrunableWeight) -> tuple[int, int]:
        """How many groups of the layer are pruned, and how many it has (waits for the device)."""
        return layer.mask.numel() - int(count_true([layer.mask])), layer.mask.numel()


@dataclass(frozen=True)
class Weight(Granularity):
    """Prune single weights: unstructured pruning."""

    def groups(self, layer: PrunableWeight, scores: Tensor, power: int = 1) -> Tensor:
        if is_sharded(scores) and not layer.transposed:  # there the order of groups is that of the weight
            return scores
        return layer.rows(whole(scores)).flatten()

    def mask(self, layer: PrunableWeight, kept: Tensor) -> Tensor:
        return kept if is_sharded(kept) else layer.from_rows(kept)


@dataclass(frozen=True)
class Filter(Granularity):
    """Prune whole output filters (rows of a Linear), each scored by the power mean of its weights' scores."""

    def supports(self, layer: PrunableWeight) -> bool:
        return not layer.stacked

    def groups(self, layer: PrunableWeight, scores: Tensor, power: int = 1) -> Tensor:
        # Summed in double so that the order of summation, which differs by device, cannot change the ranking.
        rows = layer.rows(whole(scores)).double()
        # Relative to the largest, so that no power over- or underflows.
        largest = rows.amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.double).tiny)
        mean = (rows / largest).pow(power).mean(dim=1).pow(1 / power)
        return (mean * largest.squeeze(1)).to(scores.dtype)

    def mask(self, layer: PrunableWeight, kept: Tensor) -> Tensor:
        return layer.from_rows(kept[:, None].expand(-1, layer.weight.numel() // len(kept)))

    def count_pruned(self, layer: PrunableWeight) -> tuple[int, int]:
        kept = layer.rows(whole(layer.mask)).any(1)
        return int((~kept).sum()), kept.numel()


@dataclass(frozen=True)
class NM(Granularity):
    """N:M sparsity: of every ``m`` weights that follow each other along the input channels, ``n`` are kept.

    Only the m - n smallest of each m may be pruned, so a layer is N:M, or on the way there, at any sparsity up to
    1 - n / m; of equal ones the first is kept. A layer whose input channels m does not divide stays dense.
    """

    n: int = 2
    m: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.n < self.m:
            raise UserError(f"N:M sparsity must have 0 < N < M, got {self.n}:{self.m} (2:4 runs on GPUs)")

    @property
    def max_sparsity(self) -> float:
        return 1 - self.n / self.m

    def most_pruned(self, groups: int) -> int:
        return groups // self.m * (self.m - self.n)

    def supports(self, layer: PrunableWeight) -> bool:
        return not layer.transposed and not layer.stacked and layer.weight.shape[1] % self.m == 0

    def groups(self, layer: PrunableWeight, scores: Tensor, power: int = 1) -> Tensor:
        along = whole(scores).movedim(1, -1).reshape(-1, self.m)
        order = along.argsort(dim=1, descending=True, stable=True)
        safe = torch.zeros_like(along, dtype=torch.bool).scatter_(1, order[:, : self.n], True)
        found = along.masked_fill(safe, torch.inf)
        if is_sharded(scores) and scores.dim() == 2:  # there the order of groups is that of the weight
            return like(found.view(scores.shape), scores)
        return found.flatten()

    def mask(self, layer: PrunableWeight, kept: Tensor) -> Tensor:
        if is_sharded(kept):
            return kept
        outputs, inputs, *places = layer.weight.shape
        return kept.reshape(outputs, *places, inputs).movedim(-1, 1)
