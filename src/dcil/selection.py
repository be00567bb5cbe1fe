"""Selection: which groups are kept. Exact counts, on the device that holds the scores, without waiting for it.

Sharded scores are ranked where they are: the processes add up how often each digit occurs, so that all of them find
the threshold that one process would (see sharding.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from dcil import sharding
from dcil.scope import Scope
from dcil.weight import PrunableWeight, wide


def keep_largest(scores: Tensor, pruned: int) -> Tensor:
    """A bool tensor with exactly ``pruned`` False: the smallest of the ``scores``, which are 1-D or sharded.

    Of equal scores the ones that come first are kept, so the result depends on the scores alone,
    not on the device or its sorting order. NaN counts as infinite. Nothing here reads a value back to the host.
    """
    if pruned <= 0:
        return torch.ones_like(scores, dtype=torch.bool)
    if pruned >= scores.numel():
        return torch.zeros_like(scores, dtype=torch.bool)
    if sharding.is_sharded(scores):
        return keep_largest_of_all([scores], pruned)[0]
    scores = without_nan(scores)
    threshold = kth_smallest(scores, pruned)
    above = scores > threshold
    room = scores.numel() - pruned - above.count_nonzero()
    if scores.device.type == "cpu" and room == 0:  # the usual case; elsewhere the question would wait for the device
        return above
    tied = scores == threshold
    return above | (tied & (tied.cumsum(0) <= room))


@torch.no_grad()
def select(
    scores: Sequence[Tensor],
    sparsity: float,
    scope: Scope,
    layers: Sequence[PrunableWeight],
    min_kept: int = 0,
    most_pruned: Callable[[int], int] = lambda groups: groups,
) -> list[Tensor]:
    """The groups to keep, given each layer's group scores: floor(sparsity * n) of all n groups are pruned, or what the
    scope makes of it.

    Every layer keeps its ``min_kept`` best groups, whatever the others are worth, and loses no more than
    ``most_pruned`` of its number of groups.
    """
    if not scores:  # the layers that could be pruned are frozen
        return []
    sizes = [score.numel() for score in scores]
    limits = [max(0, min(size - min_kept, most_pruned(size))) for size in sizes]
    pruned = min(int(sparsity * sum(sizes)), sum(limits))
    shares = scope.sparsities(layers, sparsity)
    if shares is None:
        if min_kept:
            scores = [s.masked_fill(keep_largest(s, n), torch.inf) for s, n in zip(scores, limits, strict=True)]
        if any(map(sharding.is_sharded, scores)):
            return keep_largest_of_all(scores, pruned)
        return list(torch.split(keep_largest(torch.cat(list(scores)), pruned), sizes))
    counts = scope.counts(shares, sizes, pruned, limits)
    return [keep_largest(score, n) for score, n in zip(scores, counts, strict=True)]


def largest_among(candidates: Tensor, scores: Tensor, count: int) -> Tensor:
    """Exactly ``count`` of the ``candidates`` (a bool tensor): those with the largest scores, which are 0 or more."""
    ranked = torch.where(candidates, wide(scores), -1.0)
    if sharding.is_sharded(ranked):
        return keep_largest(ranked, ranked.numel() - count)
    return keep_largest(ranked.flatten(), ranked.numel() - count).view_as(candidates)


def without_nan(scores: Tensor) -> Tensor:
    """The scores with infinity for NaN, which compares with nothing."""
    return torch.where(scores.isnan(), torch.inf, scores)


def count_changes(old: Sequence[Tensor], new: Sequence[Tensor]) -> Tensor:
    """(revived, dropped): how many weights a mask update brought back and took away, still on the device."""
    if any(map(sharding.is_sharded, old)):
        revived = [after & ~before for before, after in zip(old, new, strict=True)]
        dropped = [before & ~after for before, after in zip(old, new, strict=True)]
        return sharding.count_true(revived + dropped).view(2, -1).sum(1)
    before = torch.cat([_flatten(mask, like=mask) for mask in old])
    after = torch.cat([_flatten(mask, like=other) for other, mask in zip(old, new, strict=True)])
    return torch.stack([(after & ~before).count_nonzero(), (before & ~after).count_nonzero()])


def _flatten(mask: Tensor, like: Tensor) -> Tensor:
    """All elements in the memory order of ``like``: where both agree on it, nothing is copied."""
    channels_last = like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last)
    return (mask.permute(0, 2, 3, 1) if channels_last else mask).reshape(-1)


# -- the k-th smallest of many scores, without sorting them ----------------------------------------------------------


def kth_smallest(scores: Tensor, k: int) -> Tensor:
    """The k-th smallest score (from 1), as a tensor."""
    if scores.is_cuda and scores.dtype in (torch.float32, torch.float64):  # there kthvalue runs on a single processor
        return radix_select(scores, k)
    if scores.device.type == "cpu" and scores.numel() >= MANY:
        return kth_between_samples(scores, k)
    return scores.kthvalue(k).values


#: From this many scores on a CPU, every SAMPLED-th is sorted to find out where the k-th smallest lies.
MANY, SAMPLED = 100_000, 61


def kth_between_samples(scores: Tensor, k: int) -> Tensor:
    """The k-th smallest score, searched among the scores between two samples: a third of the time of searching all.

    Where the samples mislead (they are regular, the scores may be as well), all are searched.
    """
    samples = scores[::SAMPLED].sort().values
    place, spread, last = k / SAMPLED, 2 * samples.numel() ** 0.5, samples.numel() - 1
    low, high = samples[max(0, int(place - spread))], samples[min(last, int(place + spread))]
    near = scores[(scores >= low) & (scores <= high)]
    left = k - int((scores < low).count_nonzero())
    return near.kthvalue(left).values if 0 < left <= near.numel() else scores.kthvalue(k).values


def radix_select(scores: Tensor, k: int) -> Tensor:
    """The k-th smallest of float32 or float64 scores by their bits."""
    # full, not tensor: copying a number from the host would wait for the device
    return score_of(kth_smallest_key(sortable_keys(scores), torch.full((), k, device=scores.device)), scores.dtype)


#: Bits -> (shift, width) of the digits that are counted one after the other, highest first.
DIGITS = {32: ((21, 11), (10, 11), (0, 10)), 64: ((53, 11), (42, 11), (31, 11), (20, 11), (10, 10), (0, 10))}


def sortable_keys(scores: Tensor) -> Tensor:
    """Integers that, read as unsigned, are in the order of the float32 or float64 scores."""
    size = scores.element_size() * 8
    bits = (scores + 0.0).view(torch.int32 if size == 32 else torch.int64)  # + 0.0, because -0.0 equals 0.0
    keys: Tensor = bits ^ ((bits >> (size - 1)) | -(2 ** (size - 1)))
    return keys


def score_of(key: Tensor, dtype: torch.dtype) -> Tensor:
    """The score of that dtype whose sortable key this is, given as int64."""
    if dtype == torch.float64:
        flipped = key ^ -(2**63)
        return (flipped ^ ((flipped >> 63) & (2**63 - 1))).view(dtype)
    found = (key - 2**31).int()
    return (found ^ ((found >> 31) & (2**31 - 1))).view(dtype)


def kth_smallest_key(keys: Tensor, k: Tensor) -> Tensor:
    """The k-th smallest of integer keys, read as unsigned. No sort, no wait. ``k`` (from 1) is on the device too."""
    return radix_search(lambda *digit: digit_histogram(keys, *digit), k, bits=keys.element_size() * 8)


def radix_search(histogram: Callable[[int, int, Tensor], Tensor], k: Tensor, bits: int) -> Tensor:
    """The k-th smallest key (from 1) by a histogram of each of its digits, highest bits first."""
    left, prefix = k, torch.zeros((), dtype=torch.long, device=k.device)
    for shift, width in DIGITS[bits]:
        counts = histogram(shift, width, prefix)
        below = counts.cumsum(0) < left
        left = left - (counts * below).sum()
        prefix = (prefix << width) | below.sum()
    return prefix


def digit_histogram(keys: Tensor, shift: int, width: int, prefix: Tensor) -> Tensor:
    """Count the values of ``width`` bits of the keys, of those only whose higher bits are ``prefix``."""
    digits = (keys >> shift) & (2**width - 1)
    bits = keys.element_size() * 8
    if shift + width < bits:
        known = (keys >> (shift + width)) & (2 ** (bits - shift - width) - 1)
        digits = torch.where(known == prefix, digits, -1)
    if keys.is_cuda:
        return torch.histc(digits, 2**width, 0, 2**width)
    return torch.bincount(digits[digits >= 0], minlength=2**width)


# -- sharded scores --------------------------------------------------------------------------------------------------


def keep_largest_of_all(scores: Sequence[Tensor], pruned: int) -> list[Tensor]:
    """``keep_largest`` of the concatenated scores, of which some or all are sharded; each result is held as its scores.

    The order in which equal scores are kept is that of the whole tensors, flattened one after the other.
    """
    total = sum(score.numel() for score in scores)
    if not 0 < pruned < total:
        return [torch.full_like(score, pruned <= 0, dtype=torch.bool) for score in scores]
    scores = [without_nan(score) for score in scores]
    threshold = float(kth_smallest_of_all(scores, pruned))
    above, tied = [score > threshold for score in scores], [score == threshold for score in scores]
    counts = sharding.count_true(above + tied).tolist()
    room, kept = total - pruned - sum(counts[: len(scores)]), []
    for larger, ties, number in zip(above, tied, counts[len(scores) :], strict=True):
        if 0 < room < number:  # at most once: the places for ties end in this tensor
            everything = sharding.whole(ties)
            first = everything.flatten().cumsum(0).view_as(everything) <= room
            kept.append(larger | (ties & sharding.like(first, ties)))
        else:
            kept.append(larger | ties if room > 0 else larger)
        room -= number
    return kept


def kth_smallest_of_all(scores: Sequence[Tensor], k: int) -> Tensor:
    """The k-th smallest (from 1) of all scores, sharded or not: the processes add up their histograms."""
    dtype = torch.float64 if any(score.dtype == torch.float64 for score in scores) else torch.float32
    keys: dict[Hashable, list[Tensor]] = {}
    examples: dict[Hashable, Tensor] = {}
    for score in scores:
        where = sharding.layout(score)
        examples.setdefault(where, score)
        keys.setdefault(where, []).append(sortable_keys(sharding.local(score).to(dtype)).flatten())
    joined = {where: torch.cat(parts) for where, parts in keys.items()}

    def histogram(shift: int, width: int, prefix: Tensor) -> Tensor:
        found = {where: digit_histogram(part, shift, width, prefix).long() for where, part in joined.items()}
        return torch.stack([sharding.add_up(part, examples[where]) for where, part in found.items()]).sum(0)

    start = torch.full((), k, device=sharding.local(scores[0]).device)
    return score_of(radix_search(histogram, start, torch.finfo(dtype).bits), dtype)
