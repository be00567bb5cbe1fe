"""Radix select: the k-th smallest of millions of keys, four bits at a time, and the mask update that follows from it.

The same result as ``dcil.selection.kth_smallest_key``. Each of eight kernels counts one hexadecimal digit of the keys
that begin with the digits already known. Those follow from the counts of the kernels before, so every program derives
them itself, and nothing runs between two kernels. Of many keys a sample tells first which few are to be looked at.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcil.engine.kernels import window

MAX_PROGRAMS = 1056  # eight for every multiprocessor of an H100 or H200
DIGITS = 8
MANY = 2**22  # keys: from here on a sample pays


class Selected(NamedTuple):
    """key  (the k-th smallest key, how many equal ones stay behind it);  last  (the largest rank of these, 0)."""

    key: Tensor
    last: Tensor


@triton.jit
def _known_digits(counts_ptr, k_ptr, NUM_KNOWN: tl.constexpr):
    """Return the first ``NUM_KNOWN`` digits of the result, and its rank among the keys that begin with them."""
    digits = tl.arange(0, 16)
    rank = tl.load(k_ptr)
    prefix = rank * 0
    for i in tl.static_range(NUM_KNOWN):
        counts = tl.load(counts_ptr + 16 * i + digits).to(tl.int64)
        below = tl.cumsum(counts, 0) < rank
        rank -= tl.sum(tl.where(below, counts, 0), 0)
        prefix = prefix * 16 + tl.sum(below.to(tl.int64), 0)
    return prefix, rank


# prefix = the first NUM_KNOWN digits of the result
# for each key that begins with prefix:  counts[NUM_KNOWN, next digit of the key] += 1
# TIES: the same for the ranks (RANKED, else the positions) of the keys that equal selected
@triton.jit
def _count_digits_kernel(keys_ptr, ranks_ptr, selected_ptr, k_ptr, counts_ptr, size, keys_per_program,
                         NUM_KNOWN: tl.constexpr, TIES: tl.constexpr, RANKED: tl.constexpr,
                         BLOCK_SIZE: tl.constexpr):  # fmt: skip
    digits = tl.arange(0, 16)
    known, rank = _known_digits(counts_ptr, k_ptr, NUM_KNOWN)
    prefix = known.to(tl.uint32)
    total = tl.zeros([BLOCK_SIZE, 16], tl.int32)
    begin = tl.program_id(0) * keys_per_program
    end = tl.where(rank > 0, tl.minimum(size, begin + keys_per_program), begin)  # k = 0 selects nothing
    for start in range(begin, end, BLOCK_SIZE):
        offsets = start + tl.arange(0, BLOCK_SIZE)
        counted = offsets < end
        keys = tl.load(keys_ptr + offsets, mask=counted, other=0)
        if TIES:
            counted = counted & (keys == tl.load(selected_ptr))
            keys = tl.load(ranks_ptr + offsets, mask=counted, other=0) if RANKED else offsets
        keys = keys.to(tl.uint32, bitcast=True) >> (28 - 4 * NUM_KNOWN)
        matches = counted & ((keys >> 4) == prefix)
        if tl.max(matches.to(tl.int32), 0) > 0:  # after some digits most blocks have none
            digit = tl.where(matches, (keys & 15).to(tl.int32), 16)
            total += (digit[:, None] == digits[None, :]).to(tl.int32)
    tl.atomic_add(counts_ptr + 16 * NUM_KNOWN + digits, tl.sum(total, 0))


# out[0] = the k-th smallest key;  out[1] = how many keys equal to it are ranked behind it
@triton.jit
def _selected_key_kernel(counts_ptr, k_ptr, out_ptr):
    key, rank = _known_digits(counts_ptr, k_ptr, 8)
    tl.store(out_ptr, key)
    tl.store(out_ptr + 1, tl.load(counts_ptr + 16 * 7 + (key & 15)).to(tl.int64) - rank)


# threshold, num_tied_kept = selected
# masks[i] = keys[i] > threshold  or  keys[i] == threshold and num_tied_kept > 0 and ranks[i] <= last_rank
# changes = (number of masks that became True, number that became False)
@triton.jit
def _update_masks_kernel(keys_ptr, ranks_ptr, selected_ptr, last_rank_ptr, masks_ptr, changes_ptr, size,
                         RANKED: tl.constexpr, BLOCK_SIZE: tl.constexpr):  # fmt: skip
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < size
    keys, threshold = tl.load(keys_ptr + offsets, mask=mask, other=0), tl.load(selected_ptr)
    tied = mask & (keys == threshold)
    last_rank = tl.where(tl.load(selected_ptr + 1) > 0, tl.load(last_rank_ptr), -1)
    ranks = tl.load(ranks_ptr + offsets, mask=tied, other=0) if RANKED else offsets
    new = (keys > threshold) | (tied & (ranks <= last_rank))
    old = tl.load(masks_ptr + offsets, mask=mask, other=0) != 0
    tl.store(masks_ptr + offsets, new.to(tl.int8), mask=mask)
    tl.atomic_add(changes_ptr, tl.sum((mask & new & (old == 0)).to(tl.int32), 0))
    tl.atomic_add(changes_ptr + 1, tl.sum((mask & old & (new == 0)).to(tl.int32), 0))


def smallest_key(keys: Tensor, k: Tensor) -> Tensor:
    """Return the k-th smallest (from 1) of int32 keys, read as unsigned, and how many equal ones come behind it."""
    return search(keys, None, keys, k, ties=False)


def search(keys: Tensor, ranks: Tensor | None, selected: Tensor, k: Tensor, ties: bool) -> Tensor:
    """Return the k-th smallest key, or, of the ``ties`` with the selected key, the k-th smallest rank; 0 for k = 0."""
    counts = torch.zeros(DIGITS, 16, dtype=torch.int32, device=keys.device)
    found = torch.empty(2, dtype=torch.long, device=keys.device)
    block, size = 512, keys.numel()
    keys_per_program = block * triton.cdiv(triton.cdiv(size, block), MAX_PROGRAMS)
    for known in range(DIGITS):
        _count_digits_kernel[(triton.cdiv(size, keys_per_program),)](
            keys, keys if ranks is None else ranks, selected, k, counts, size, keys_per_program, NUM_KNOWN=known,
            TIES=ties, RANKED=ranks is not None, BLOCK_SIZE=block, num_warps=4,
        )  # fmt: skip
    _selected_key_kernel[(1,)](counts, k, found, num_warps=1)
    return found


def select(keys: Tensor, ranks: Tensor | None, k: Tensor) -> Selected:
    """Return the k-th smallest key and which of the ties with it are kept: mostly none is, and nothing is counted."""
    key = smallest_key(keys, k)
    return Selected(key, search(keys, ranks, key, key[1], ties=True))


def select_of_many(keys: Tensor, ranks: Tensor | None, k: Tensor) -> Selected:
    """Return the same for keys >= 0: of the few in a window where it is expected, otherwise, by bad luck, of all."""
    found = window.narrow(keys, ranks, k, smallest_key)
    inside, all_keys = select(found.keys, found.ranks, found.k_inside), select(keys, ranks, found.k_outside)
    return Selected(inside.key + all_keys.key, inside.last + all_keys.last)  # one of them has k = 0, and selects 0


def keep_largest(keys: Tensor, ranks: Tensor | None, num_pruned: Tensor, masks: Tensor) -> Tensor:
    """Prune the ``num_pruned`` smallest keys (int32, >= 0), of tied ones those of higher rank, in ``masks``.

    ``ranks``: None stands for the positions. Returns the numbers of revived and of pruned weights.
    """
    selected = (select_of_many if keys.numel() >= MANY else select)(keys, ranks, num_pruned)
    changes = torch.zeros(2, dtype=torch.int32, device=keys.device)
    size, block = keys.numel(), 4096
    _update_masks_kernel[(triton.cdiv(size, block),)](
        keys, keys if ranks is None else ranks, selected.key, selected.last, masks.view(torch.int8), changes, size,
        RANKED=ranks is not None, BLOCK_SIZE=block, num_warps=4,
    )  # fmt: skip
    return changes.long()
