"""Selection: which groups are kept. Exact counts, on the device that holds the scores, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dcil.scope import Scope, apportion
from dcil.weight import PrunableWeight


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
def select(
    scores: Sequence[Tensor], sparsity: float, scope: Scope, layers: Sequence[PrunableWeight], min_kept: int = 0
) -> list[Tensor]:
    """The groups to keep, given each layer's 1-D group scores: floor(sparsity * n) of all n groups are pruned.

    Every layer keeps its ``min_kept`` best groups, whatever the others are worth.
    """
    sizes = [score.numel() for score in scores]
    limits = [max(0, size - min_kept) for size in sizes]
    pruned = min(int(sparsity * sum(sizes)), sum(limits))
    shares = scope.sparsities(layers, sparsity)
    if shares is None:
        if min_kept:
            scores = [s.masked_fill(keep_largest(s, n), torch.inf) for s, n in zip(scores, limits, strict=True)]
        return list(torch.split(keep_largest(torch.cat(list(scores)), pruned), sizes))
    counts = apportion(shares, sizes, pruned, limits)
    return [keep_largest(score, n) for score, n in zip(scores, counts, strict=True)]


def largest_among(candidates: Tensor, scores: Tensor, count: int) -> Tensor:
    """Exactly ``count`` of the ``candidates`` (a bool tensor): those with the largest scores, which are 0 or more."""
    tiny = torch.finfo(torch.float32).tiny  # so that no candidate ties with what is none
    ranked = torch.where(candidates, scores.float().clamp_min(tiny), 0.0).flatten()
    return keep_largest(ranked, ranked.numel() - count).view_as(candidates)


def count_changes(old: Sequence[Tensor], new: Sequence[Tensor]) -> Tensor:
    """(revived, dropped): how many weights a mask update brought back and took away, still on the device."""
    before = torch.cat([_flatten(mask, like=mask) for mask in old])
    after = torch.cat([_flatten(mask, like=other) for other, mask in zip(old, new, strict=True)])
    return torch.stack([(after & ~before).sum(), (before & ~after).sum()])


def _flatten(mask: Tensor, like: Tensor) -> Tensor:
    """All elements in the memory order of ``like``: where both agree on it, nothing is copied."""
    channels_last = like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last)
    return (mask.permute(0, 2, 3, 1) if channels_last else mask).reshape(-1)


# -- the k-th smallest of many scores, without sorting them ----------------------------------------------------------


def kth_smallest(scores: Tensor, k: int) -> Tensor:
    """The k-th smallest score (from 1), as a tensor."""
    if scores.is_cuda and scores.dtype == torch.float32:  # there kthvalue runs on a single processor of the GPU
        return radix_select(scores, k)
    return scores.kthvalue(k).values


def radix_select(scores: Tensor, k: int) -> Tensor:
    """The k-th smallest of float32 scores by their bits."""
    bits = (scores + 0.0).view(torch.int32)  # + 0.0, because -0.0 equals 0.0
    keys = bits ^ ((bits >> 31) | -(2**31))  # as unsigned integers these are in the order of the scores
    # full, not tensor: copying a number from the host would wait for the device
    found = (kth_smallest_key(keys, torch.full((), k, device=scores.device)) - 2**31).int()
    return (found ^ ((found >> 31) & (2**31 - 1))).view(torch.float32)


def kth_smallest_key(keys: Tensor, k: Tensor) -> Tensor:
    """The k-th smallest of int32 keys, read as unsigned: radix selection by three histograms, highest bits first.

    No sort, no wait. ``k`` (from 1) is on the device too.
    """
    left, prefix = k, torch.zeros((), dtype=torch.long, device=keys.device)
    for shift, width in ((21, 11), (10, 11), (0, 10)):
        counts = digit_histogram(keys, shift, width, prefix)
        below = counts.cumsum(0) < left
        left = left - (counts * below).sum()
        prefix = (prefix << width) | below.sum()
    return prefix


def digit_histogram(keys: Tensor, shift: int, width: int, prefix: Tensor) -> Tensor:
    """Count the values of ``width`` bits of the keys, of those only whose higher bits are ``prefix``."""
    digits = (keys >> shift) & (2**width - 1)
    if shift + width < 32:
        known = (keys >> (shift + width)) & (2 ** (32 - shift - width) - 1)
        digits = torch.where(known == prefix, digits, -1)
    if keys.is_cuda:
        return torch.histc(digits, 2**width, 0, 2**width)
    return torch.bincount(digits[digits >= 0], minlength=2**width)
