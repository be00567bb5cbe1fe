"""Which weights stay: exact counts, on the device that holds the scores, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dcil.kth import kth_smallest
from dcil.layer import Layer
from dcil.scope import Scope, counts


def keep_largest(scores: Tensor, pruned: int) -> Tensor:
    """A bool tensor with exactly ``pruned`` False: the smallest of the 1-D ``scores``.

    Of equal scores the ones that come first are kept, so the result depends on the scores alone,
    not on the device or its sorting order. Nothing here reads a value back to the host.
    """
    if pruned <= 0:
        return torch.ones_like(scores, dtype=torch.bool)
    if pruned >= scores.numel():
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = kth_smallest(scores, pruned)
    above = scores > threshold
    tied = scores == threshold
    room = scores.numel() - pruned - above.sum()
    return above | (tied & (tied.cumsum(0) <= room))


@torch.no_grad()
def select(scores: Sequence[Tensor], sparsity: float, scope: Scope, layers: Sequence[Layer]) -> list[Tensor]:
    """For each layer's 1-D group scores the groups to keep: floor(sparsity * n) of all n groups go."""
    sizes = [score.numel() for score in scores]
    pruned = int(sparsity * sum(sizes))
    shares = scope.sparsities(layers, sparsity)
    if shares is None:
        return list(torch.split(keep_largest(torch.cat(list(scores)), pruned), sizes))
    each = counts(shares, sizes, pruned)
    return [keep_largest(score, n) for score, n in zip(scores, each, strict=True)]


def largest_among(candidates: Tensor, scores: Tensor, count: int) -> Tensor:
    """Exactly ``count`` of the ``candidates`` (a bool tensor): those with the largest scores, which are 0 or more."""
    tiny = torch.finfo(torch.float32).tiny  # so that no candidate ties with what is none
    ranked = torch.where(candidates, scores.float().clamp_min(tiny), 0.0).flatten()
    return keep_largest(ranked, ranked.numel() - count).view_as(candidates)


def changes(old: Sequence[Tensor], new: Sequence[Tensor]) -> Tensor:
    """(revived, dropped): how many weights a mask update brought back and took away, still on the device."""
    before = torch.cat([_line(o, o) for o in old])
    after = torch.cat([_line(n, o) for o, n in zip(old, new, strict=True)])
    return torch.stack([(after & ~before).sum(), (before & ~after).sum()])


def _line(mask: Tensor, like: Tensor) -> Tensor:
    """All elements in a row, in the memory order of ``like``: where both agree on it, nothing is copied."""
    last = like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last)
    return (mask.permute(0, 2, 3, 1) if last else mask).reshape(-1)
