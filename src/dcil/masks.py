"""Which weights stay: exact counts, on the device that holds the scores, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dcil.criteria import Criterion
from dcil.granularity import Granularity
from dcil.layer import Layer


def keep_largest(scores: Tensor, pruned: int) -> Tensor:
    """A bool tensor with exactly ``pruned`` False: the smallest of the 1-D ``scores``.

    Of equal scores the ones that come first are kept, so the result depends on the scores alone,
    not on the device or its sorting order. Nothing here reads a value back to the host.
    """
    if pruned <= 0:
        return torch.ones_like(scores, dtype=torch.bool)
    if pruned >= scores.numel():
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = scores.kthvalue(pruned).values
    above = scores > threshold
    tied = scores == threshold
    room = scores.numel() - pruned - above.sum()
    return above | (tied & (tied.cumsum(0) <= room))


@torch.no_grad()
def select(layers: Sequence[Layer], sparsity: float, criterion: Criterion, granularity: Granularity) -> list[Tensor]:
    """One ranking across all layers: a mask per layer, with floor(sparsity * n) of the n groups pruned in all."""
    rows = [layer.rows(criterion.score(layer.weight, layer.weight.grad)) for layer in layers]
    groups = [granularity.groups(scores) for scores in rows]
    ranking = torch.cat(groups)
    kept = torch.split(keep_largest(ranking, int(sparsity * ranking.numel())), [g.numel() for g in groups])
    return [layer.fold(granularity.expand(k, tuple(r.shape))) for layer, k, r in zip(layers, kept, rows, strict=True)]


def changes(old: Sequence[Tensor], new: Sequence[Tensor]) -> Tensor:
    """(revived, dropped): how many weights a mask update brought back and took away, still on the device."""
    counts = [torch.stack([(n & ~o).sum(), (o & ~n).sum()]) for o, n in zip(old, new, strict=True)]
    return torch.stack(counts).sum(0)
