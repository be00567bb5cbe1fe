"""Granularities: what is pruned as one piece. Scores per weight -> scores per group; kept groups -> mask.

Both directions speak of one layer, read as rows (see layer.py); masks.py selects across layers in between.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Granularity:
    """How the weights of a layer fall into groups that live and die together."""

    def groups(self, scores: Tensor) -> Tensor:
        """Scores (filters, weights per filter) -> one score per group, 1-D."""
        raise NotImplementedError("abstract: a granularity defines groups")

    def expand(self, kept: Tensor, shape: tuple[int, ...]) -> Tensor:
        """One bool per group -> one per weight, of ``shape`` (filters, weights per filter)."""
        raise NotImplementedError("abstract: a granularity defines expand")


@dataclass(frozen=True)
class Weight(Granularity):
    """Single weights: unstructured pruning."""

    def groups(self, scores: Tensor) -> Tensor:
        return scores.flatten()

    def expand(self, kept: Tensor, shape: tuple[int, ...]) -> Tensor:
        return kept.reshape(shape)


@dataclass(frozen=True)
class Filter(Granularity):
    """Whole output filters (rows of a Linear), each scored by the mean of its weights' scores."""

    def groups(self, scores: Tensor) -> Tensor:
        # Summed in double so that the order of summation, which differs by device, cannot change the ranking.
        return scores.double().mean(dim=1).float()

    def expand(self, kept: Tensor, shape: tuple[int, ...]) -> Tensor:
        return kept[:, None].expand(shape)
