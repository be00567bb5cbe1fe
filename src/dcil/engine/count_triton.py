"""Histograms of the bits of millions of keys (Triton), for ``dcil.kth.smallest_key``."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

PROGRAMS = 528  # four for every processor of an H100 or H200


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _count(keys, prefix, counts, size, chunk, SHIFT: tl.constexpr, WIDTH: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    bins = tl.arange(0, 2**WIDTH)
    total = tl.zeros([2**WIDTH], tl.int32)
    first = tl.program_id(0) * chunk
    last = tl.minimum(size, first + chunk)
    wanted = tl.load(prefix).to(tl.uint32)
    for start in range(first, last, B):
        at = start + tl.arange(0, B)
        key = tl.load(keys + at, mask=at < last, other=0).to(tl.uint32, bitcast=True)
        ok = at < last
        if SHIFT + WIDTH < 32:
            ok = ok & ((key >> (SHIFT + WIDTH)) == wanted)
        total += tl.histogram(((key >> SHIFT) & (2**WIDTH - 1)).to(tl.int32), 2**WIDTH, mask=ok)
    tl.atomic_add(counts + bins, total, mask=total > 0)


def digit_counts(keys: Tensor, shift: int, width: int, prefix: Tensor) -> Tensor:
    """As ``dcil.kth.digit_counts``, in one kernel that reads the keys once."""
    counts = torch.zeros(2**width, dtype=torch.int32, device=keys.device)
    block = 2048
    chunk = block * triton.cdiv(triton.cdiv(keys.numel(), block), PROGRAMS)
    grid = (triton.cdiv(keys.numel(), chunk),)
    _count[grid](keys, prefix, counts, keys.numel(), chunk, SHIFT=shift, WIDTH=width, B=block, num_warps=8)
    return counts
