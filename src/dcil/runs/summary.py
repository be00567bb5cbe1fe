"""Summarise the accuracies of a run, or its losses: last, best and spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TypedDict


class Summary(TypedDict):
    """Accuracies in percent, or losses; ``std`` is the spread over the last tenth of the epochs."""

    last: float
    best: float
    best_epoch: int
    std: float


def summarise(top1: Sequence[float | None]) -> Summary:
    """Return last and best accuracy, the first epoch of the best, and the spread over the last tenth of the epochs.

    The spread is the population standard deviation over max(2, epochs // 10) epochs, or as many as there are:
    the paper's measure of stability. Epochs that were not evaluated are None and do not count.
    """
    measured = [value for value in top1 if value is not None]
    if not measured:
        raise ValueError("there must be at least one epoch to summarise, got none")
    best = max(measured)
    tail = [value for value in top1[-max(2, len(top1) // 10) :] if value is not None] or measured[-1:]
    return Summary(last=measured[-1], best=best, best_epoch=list(top1).index(best) + 1, std=statistics.pstdev(tail))


def best_epoch(values: Sequence[float | None], sparsity: Sequence[float], sign: int = 1) -> int:
    """Return the index of the best epoch of those that are as sparse as the last one, within a hundredth.

    Less sparse epochs do not count: a network that is not pruned yet is another network. The best is the highest value
    or, with ``sign`` -1, the lowest.
    """
    as_sparse = {i: sign * v for i, v in enumerate(values) if v is not None and sparsity[i] >= sparsity[-1] - 0.01}
    return max(as_sparse, key=lambda i: as_sparse[i])


def summarise_loss(loss: Sequence[float | None], sparsity: Sequence[float]) -> Summary | None:
    """Summarise losses, of which the lowest is the best; None where the last epoch has none, as in earlier runs."""
    if not loss or loss[-1] is None:
        return None
    found, best = summarise(loss), best_epoch(loss, sparsity, sign=-1)
    return Summary(last=found["last"], best=float(loss[best] or 0.0), best_epoch=best + 1, std=found["std"])
