"""Summarise the accuracies of a run: last, best and spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TypedDict


class Summary(TypedDict):
    """Accuracies in percent; ``std`` is the spread over the last tenth of the epochs."""

    last: float
    best: float
    best_epoch: int
    std: float


def summarise(top1: Sequence[float]) -> Summary:
    """Return last and best accuracy, the first epoch of the best, and the spread over the last tenth of the epochs.

    The spread is the population standard deviation over max(2, epochs // 10) epochs, or as many as there are:
    the paper's measure of stability.
    """
    if not top1:
        raise ValueError("there must be at least one epoch to summarise, got none")
    best = max(top1)
    tail = top1[-max(2, len(top1) // 10) :]
    return Summary(last=top1[-1], best=best, best_epoch=list(top1).index(best) + 1, std=statistics.pstdev(tail))


def best_epoch(top1: Sequence[float], sparsity: Sequence[float]) -> int:
    """Return the index of the best epoch of those that are as sparse as the last one, within a hundredth.

    Less sparse epochs do not count: a network that is not pruned yet is another network.
    """
    return max((i for i, s in enumerate(sparsity) if s >= sparsity[-1] - 0.01), key=lambda i: top1[i])
