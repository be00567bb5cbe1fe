"""The k-th smallest of millions of keys (Triton): as ``dcil.selection.smallest_key``, four bits at a time; and the mask
update that follows from it.

Each of eight kernels counts one hexadecimal digit, of the keys that begin with what is known of the result. What is
known follows from the counts of the kernels before, so each finds it by itself, and nothing runs in between.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

PROGRAMS = 1056  # eight for every processor of an H100 or H200
DIGITS = 8
LAST = 2**31 - 1


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _known(counts, k, DONE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first ``DONE`` digits of the result, and its rank among the keys that begin with them."""
    digit = tl.arange(0, 16)
    left = tl.load(k)
    prefix = left * 0
    for i in tl.static_range(DONE):
        found = tl.load(counts + 16 * i + digit).to(tl.int64)
        below = tl.cumsum(found, 0) < left
        left -= tl.sum(tl.where(below, found, 0), 0)
        prefix = prefix * 16 + tl.sum(below.to(tl.int64), 0)
    return prefix, left


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _count(keys, k, counts, size, chunk, DONE: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    digit = tl.arange(0, 16)
    known, left = _known(counts, k, DONE)
    prefix = known.to(tl.uint32)
    total = tl.zeros([B, 16], tl.int32)
    first = tl.program_id(0) * chunk
    last = tl.where(left > 0, tl.minimum(size, first + chunk), first)  # the 0-th is not looked for
    for start in range(first, last, B):
        at = start + tl.arange(0, B)
        key = tl.load(keys + at, mask=at < last, other=0).to(tl.uint32, bitcast=True) >> (28 - 4 * DONE)
        ours = (at < last) & ((key >> 4) == prefix)
        if tl.max(ours.to(tl.int32), 0) > 0:  # after some digits most blocks have none
            now = tl.where(ours, (key & 15).to(tl.int32), 16)
            total += (now[:, None] == digit[None, :]).to(tl.int32)
    tl.atomic_add(counts + 16 * DONE + digit, tl.sum(total, 0))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _result(counts, k, out):  # type: ignore[no-untyped-def]
    key, left = _known(counts, k, 8)
    tl.store(out, key)
    tl.store(out + 1, tl.load(counts + 16 * 7 + (key & 15)).to(tl.int64) - left)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _move(keys, place, found, last, masks, changes, size, B: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * B + tl.arange(0, B)
    inside = at < size
    key, threshold = tl.load(keys + at, mask=inside, other=0), tl.load(found)
    tied = inside & (key == threshold)
    limit = tl.where(tl.load(found + 1) > 0, tl.load(last), -1)
    new = (key > threshold) | (tied & (tl.load(place + at, mask=tied, other=0) <= limit))
    old = tl.load(masks + at, mask=inside, other=0) != 0
    tl.store(masks + at, new.to(tl.int8), mask=inside)
    tl.atomic_add(changes, tl.sum((inside & new & (old == 0)).to(tl.int32), 0))
    tl.atomic_add(changes + 1, tl.sum((inside & old & (new == 0)).to(tl.int32), 0))


def smallest_key(keys: Tensor, k: Tensor) -> Tensor:
    """The k-th smallest (from 1) of int32 keys, read as unsigned, and how many equal ones come behind it."""
    counts = torch.zeros(DIGITS, 16, dtype=torch.int32, device=keys.device)
    found = torch.empty(2, dtype=torch.long, device=keys.device)
    block, size = 512, keys.numel()
    chunk = block * triton.cdiv(triton.cdiv(size, block), PROGRAMS)
    for done in range(DIGITS):
        _count[(triton.cdiv(size, chunk),)](keys, k, counts, size, chunk, DONE=done, B=block, num_warps=4)
    _result[(1,)](counts, k, found, num_warps=1)
    return found


def keep_largest(keys: Tensor, place: Tensor, pruned: Tensor, masks: Tensor) -> Tensor:
    """Prune the ``pruned`` smallest keys, at a tie those further behind; the numbers of revived and pruned ones."""
    found = smallest_key(keys, pruned)
    # Who of those at the threshold stays. Mostly none does, and then nothing is counted here.
    last = smallest_key(torch.where(keys == found[0], place, LAST), found[1])
    changes = torch.zeros(2, dtype=torch.int32, device=keys.device)
    size, block = keys.numel(), 4096
    _move[(triton.cdiv(size, block),)](
        keys, place, found, last, masks.view(torch.int8), changes, size, B=block, num_warps=4
    )  # fmt: skip
    return changes.long()
