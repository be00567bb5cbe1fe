"""The epochs whose accuracy a number of the results page needs; the others are not evaluated.

    last, top-5                         the last epoch
    best                                those as sparse as the last one, within a hundredth (runs/summary.py)
    std of the last 10 % of epochs      the last tenth
    accuracy by the age of the masks    the last fifth
    figures by epoch                    every fifth

A method that is as sparse from the start, or dense, has its best epoch anywhere: all of them are needed.
"""

from __future__ import annotations

from dcil.granularity import Weight
from dcil.method import Method

EVERY = 5
LAST_PART = 5
MARGIN, FILTER_MARGIN = 0.01, 0.05  # of groups: the sparsity of a network whose filters are pruned counts weights


def needed_epochs(method: Method, total: int) -> frozenset[int]:
    """Return which of the epochs 0 to ``total`` - 1 are to be evaluated."""
    ends = [method.sparsity_at((epoch + 1) * method.epoch_steps) for epoch in range(total)]
    margin = MARGIN if isinstance(method.granularity, Weight) else FILTER_MARGIN
    tail = total - max(2, total // LAST_PART)
    return frozenset(
        epoch
        for epoch, sparsity in enumerate(ends)
        if epoch >= tail or (epoch + 1) % EVERY == 0 or sparsity >= ends[-1] - margin
    )
