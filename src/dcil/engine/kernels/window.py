"""Narrow the search for the k-th smallest of many keys to a window around where a sample expects it.

Every 61st key is a sample of m. Its share of keys below the k-th smallest is k / n, up to a standard deviation of at
most 1 / (2 sqrt(m)); the window is eight of them wide to either side. One pass counts the keys below and collects those
inside, a hundredth of all. The result is exact: where the window misses it, or overflows, all keys are searched.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_PROGRAMS = 1056  # eight for every multiprocessor of an H100 or H200
STRIDE = 61  # prime: no multiple of a layer's width, so all columns are in the sample
LARGEST_KEY = 2**31 - 1


class Window(NamedTuple):
    """The keys inside, in any order, with their ranks, filled up with the largest key; where the k-th smallest of all
    is among them (from 1), and where among all keys: one of the two is 0."""

    keys: Tensor
    ranks: Tensor
    k_inside: Tensor
    k_outside: Tensor


# for each key:  counts[0] += key < lower;  if lower <= key <= upper:  found[counts[1]++] = key, rank
@triton.jit
def _collect_kernel(keys_ptr, ranks_ptr, lower_ptr, upper_ptr, places_ptr, found_keys_ptr, found_ranks_ptr, counts_ptr,
                    size, capacity, sample_size, keys_per_program, RANKED: tl.constexpr,
                    BLOCK_SIZE: tl.constexpr):  # fmt: skip
    lower = tl.load(lower_ptr)
    upper = tl.where(tl.load(places_ptr + 1) >= sample_size, 2147483647, tl.load(upper_ptr))  # no key is larger
    num_below = tl.zeros([BLOCK_SIZE], tl.int32)
    begin = tl.program_id(0) * keys_per_program
    end = tl.minimum(size, begin + keys_per_program)
    for start in range(begin, end, BLOCK_SIZE):
        offsets = start + tl.arange(0, BLOCK_SIZE)
        mask = offsets < end
        keys = tl.load(keys_ptr + offsets, mask=mask, other=0)
        num_below += (mask & (keys < lower)).to(tl.int32)
        inside = mask & (keys >= lower) & (keys <= upper)
        number = tl.sum(inside.to(tl.int32), 0)
        if number > 0:
            first = tl.atomic_add(counts_ptr + 1, number.to(tl.int64))
            at = first + tl.cumsum(inside.to(tl.int32), 0) - 1
            fits = inside & (at < capacity)
            tl.store(found_keys_ptr + at, keys, mask=fits)
            ranks = tl.load(ranks_ptr + offsets, mask=inside, other=0) if RANKED else offsets
            tl.store(found_ranks_ptr + at, ranks, mask=fits)
    tl.atomic_add(counts_ptr, tl.sum(num_below, 0).to(tl.int64))


# inside = k - the keys below the window, if that is a place in it, else 0;  outside = k if inside is 0, else 0
@triton.jit
def _place_kernel(k_ptr, counts_ptr, inside_ptr, outside_ptr, capacity):
    k, num_inside = tl.load(k_ptr), tl.load(counts_ptr + 1)
    place = k - tl.load(counts_ptr)
    hit = (place >= 1) & (place <= num_inside) & (num_inside <= capacity)
    tl.store(inside_ptr, tl.where(hit, place, 0))
    tl.store(outside_ptr, tl.where(hit, 0, k))


def narrow(keys: Tensor, ranks: Tensor | None, k: Tensor, smallest_key: Callable[[Tensor, Tensor], Tensor]) -> Window:
    """Return the window of int32 keys >= 0 in which the k-th smallest is expected; nothing waits for the device."""
    sample = keys[::STRIDE].contiguous()
    margin = 4 * math.isqrt(len(sample)) + 8
    expected = k * len(sample) // len(keys)
    places = torch.stack([expected - margin, expected + margin]).clamp_(0, len(sample))  # 0 stands for no bound
    lower, upper = smallest_key(sample, places[0]), smallest_key(sample, places[1])
    capacity = 4 * margin * STRIDE  # twice of what is expected
    found = torch.full((2, capacity), LARGEST_KEY, dtype=torch.int32, device=keys.device)
    counts = torch.zeros(2, dtype=torch.long, device=keys.device)
    block = 2048
    keys_per_program = block * triton.cdiv(triton.cdiv(len(keys), block), MAX_PROGRAMS)
    _collect_kernel[(triton.cdiv(len(keys), keys_per_program),)](
        keys, keys if ranks is None else ranks, lower, upper, places, found[0], found[1], counts, len(keys), capacity,
        len(sample), keys_per_program, RANKED=ranks is not None, BLOCK_SIZE=block, num_warps=8,
    )  # fmt: skip
    inside, outside = torch.empty(2, dtype=torch.long, device=keys.device).unbind()
    _place_kernel[(1,)](k, counts, inside, outside, capacity, num_warps=1)
    return Window(found[0], found[1], inside, outside)
