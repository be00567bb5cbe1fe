"""Criteria: how much each weight is worth, as one score per weight (larger = keep)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Criterion:
    """``score(weight, grad)`` gives a tensor of the weight's shape; ``grad`` may be None before the first backward."""

    def score(self, weight: Tensor, grad: Tensor | None) -> Tensor:
        raise NotImplementedError("abstract: a criterion defines score")


@dataclass(frozen=True)
class Magnitude(Criterion):
    """w^2, the L2 criterion of DPF and DCIL. Its mean over a filter is that filter's score."""

    def score(self, weight: Tensor, grad: Tensor | None) -> Tensor:
        return weight.detach().float().square()
