"""The k-th smallest of millions of keys (Triton): as ``dcil.kth.smallest_key``, four bits at a time.

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


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _known(counts, k, DONE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first ``DONE`` digits of the result."""
    digit = tl.arange(0, 16)
    left = tl.load(k)
    prefix = left * 0
    for i in tl.static_range(DONE):
        found = tl.load(counts + 16 * i + digit).to(tl.int64)
        below = tl.cumsum(found, 0) < left
        left -= tl.sum(tl.where(below, found, 0), 0)
        prefix = prefix * 16 + tl.sum(below.to(tl.int64), 0)
    return prefix


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _count(keys, k, counts, size, chunk, DONE: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    digit = tl.arange(0, 16)
    prefix = _known(counts, k, DONE).to(tl.uint32)
    total = tl.zeros([B, 16], tl.int32)
    first = tl.program_id(0) * chunk
    last = tl.minimum(size, first + chunk)
    for start in range(first, last, B):
        at = start + tl.arange(0, B)
        key = tl.load(keys + at, mask=at < last, other=0).to(tl.uint32, bitcast=True) >> (28 - 4 * DONE)
        now = tl.where((at < last) & ((key >> 4) == prefix), (key & 15).to(tl.int32), 16)
        total += (now[:, None] == digit[None, :]).to(tl.int32)
    tl.atomic_add(counts + 16 * DONE + digit, tl.sum(total, 0))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _result(counts, k, out):  # type: ignore[no-untyped-def]
    tl.store(out, _known(counts, k, 8))


def smallest_key(keys: Tensor, k: Tensor) -> Tensor:
    """The k-th smallest (from 1) of int32 keys, read as unsigned."""
    counts = torch.zeros(DIGITS, 16, dtype=torch.int32, device=keys.device)
    found = torch.empty((), dtype=torch.long, device=keys.device)
    block, size = 512, keys.numel()
    chunk = block * triton.cdiv(triton.cdiv(size, block), PROGRAMS)
    for done in range(DIGITS):
        _count[(triton.cdiv(size, chunk),)](keys, k, counts, size, chunk, DONE=done, B=block, num_warps=4)
    _result[(1,)](counts, k, found, num_warps=1)
    return found
