"""Encode masks as bits: the shorter of one bit per weight and the Golomb-Rice code of the gaps between kept weights.

A kept weight's gap g, the zeros before it, is written as g >> k in unary and k low bits. For kept fraction p the gaps
are geometric and the best k costs a few percent more than the entropy n H(p). The unary and the low bits stand in
streams of their own, so that numpy reads them without a loop.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dcil.errors import UserError

Bytes = NDArray[np.uint8]
Mask = NDArray[np.bool_]
PACKED = -1  #: instead of k: one bit per weight
LARGEST_K = 24


def best_k(mask: Mask) -> int:
    """Return k of the shortest code, or PACKED."""
    gaps = _gaps(mask)
    if not len(gaps):
        return 0
    sizes = {k: _size(len(gaps) * k) + _size(int((gaps >> k).sum()) + len(gaps)) for k in range(LARGEST_K + 1)}
    k = min(sizes, key=sizes.__getitem__)
    return k if sizes[k] < _size(mask.size) else PACKED


def encode(mask: Mask, k: int) -> tuple[Bytes, Bytes]:
    """Encode a flat mask as (low bits, unary bits); one bit per weight has no low bits."""
    if k == PACKED:
        return np.zeros(0, np.uint8), np.packbits(mask)
    gaps = _gaps(mask)
    low = (gaps[:, None] >> np.arange(k)) & 1
    unary = np.zeros(int((gaps >> k).sum()) + len(gaps), np.uint8)
    unary[np.cumsum((gaps >> k) + 1) - 1] = 1
    return np.packbits(low.astype(np.uint8)), np.packbits(unary)


def low_size(kept: int, k: int) -> int:
    """Return the bytes of the low bits."""
    return 0 if k == PACKED else _size(kept * k)


def decode(low: Bytes, unary: Bytes, k: int, kept: int, n: int) -> NDArray[np.int64]:
    """Return the positions of the ``kept`` weights among ``n``; raise on input that `encode` does not write.

    Allocates in proportion to the bytes given, never to ``n``.
    """
    if k == PACKED:
        ok = len(unary) == _size(n)
        positions = np.flatnonzero(np.unpackbits(unary)) if ok else np.zeros(0, np.int64)
        if not ok or len(positions) != kept or (kept and positions[-1] >= n):
            raise UserError("a mask does not fit its tensor")
        return positions
    ends = np.flatnonzero(np.unpackbits(unary))
    bits = np.unpackbits(low)
    used = int(ends[-1]) + 1 if len(ends) else 0
    if len(ends) != kept or _size(used) != len(unary) or len(low) != _size(kept * k) or bits[kept * k :].any():
        raise UserError("a mask's code has too few or too many bits")
    high = np.diff(ends, prepend=-1) - 1
    rest = bits[: kept * k].reshape(kept, k).astype(np.int64) @ (np.int64(1) << np.arange(k, dtype=np.int64))
    # Python's integers cannot overflow; the last position follows from the sums alone.
    if (int(high.sum()) << k) + int(rest.sum()) + kept > n:
        raise UserError("a mask points beyond its tensor")
    return np.cumsum((high << k) + rest + 1) - 1


def _gaps(mask: Mask) -> NDArray[np.int64]:
    return np.diff(np.flatnonzero(mask), prepend=-1) - 1


def _size(bits: int) -> int:
    return (bits + 7) // 8
