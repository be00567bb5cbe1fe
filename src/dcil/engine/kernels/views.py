"""What the paths see of all weights, and what their gradients are for the weights, in one kernel each (Triton).

The views of ``dcil.views`` treat every weight alike, so their values and gradient rules can be written down again here:

    view               value   share of its gradient
    kept               m w     m
    revived            w       1 - m
    straight_through   m w     1
    whole              w       1
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from dcil import views

#: View -> (is the value masked, share of the gradient: 0 everything, 1 the kept weights, 2 the pruned ones).
RULES: dict[views.View, tuple[bool, int]] = {
    views.kept: (True, 1),
    views.revived: (False, 2),
    views.straight_through: (True, 0),
    views.whole: (False, 0),
}


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _see(w, m, index, values, size, MASKED: tl.constexpr, INDEXED: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    ok = at < size
    value = tl.load(w + at, mask=ok, other=0.0)
    if MASKED:
        value = tl.where(tl.load(m + at, mask=ok, other=0) != 0, value, value * 0.0)  # as w * m: what is NaN stays so
    place = tl.load(index + at, mask=ok, other=0) if INDEXED else at
    tl.store(values + place, value.to(values.dtype.element_ty), mask=ok)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _share(gradients, index, kept, at, ok, SHARE: tl.constexpr, INDEXED: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.load(index + at, mask=ok, other=0) if INDEXED else at
    g = tl.load(gradients + place, mask=ok, other=0.0).to(tl.float32)
    if SHARE == 1:
        g = tl.where(kept, g, 0.0)
    if SHARE == 2:
        g = tl.where(kept, 0.0, g)
    return g


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _collect(one, two, index_one, index_two, m, out, size, SHARE_ONE: tl.constexpr, SHARE_TWO: tl.constexpr,  # type: ignore[no-untyped-def]
             TWO: tl.constexpr, INDEXED: tl.constexpr, B: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    ok = at < size
    kept = tl.load(m + at, mask=ok, other=0) != 0
    g = _share(one, index_one, kept, at, ok, SHARE_ONE, INDEXED)
    if TWO:
        g += _share(two, index_two, kept, at, ok, SHARE_TWO, INDEXED)
    tl.store(out + at, g, mask=ok)


def see(view: views.View, w: Tensor, m: Tensor, index: Tensor | None, values: Tensor) -> None:
    """The value of ``view``, in the precision of ``values``, to where ``index`` says."""
    size, bits = m.numel(), m.view(torch.uint8)
    place = bits if index is None else index
    _see[(triton.cdiv(size, 1024),)](
        w, bits, place, values, size, MASKED=RULES[view][0], INDEXED=index is not None, B=1024
    )  # fmt: skip


def collect(paths: Sequence[tuple[views.View, Tensor, Tensor | None]], m: Tensor, out: Tensor) -> None:
    """The sum of the shares of one or two gradients, (view, gradients, index) each: for DCIL the refined gradient."""
    (first, one, index_one), (second, two, index_two) = paths[0], paths[-1]
    size, bits, indexed = m.numel(), m.view(torch.uint8), index_one is not None
    indices = (bits, bits) if index_one is None or index_two is None else (index_one, index_two)
    _collect[(triton.cdiv(size, 1024),)](
        one, two, *indices, bits, out, size, SHARE_ONE=RULES[first][1], SHARE_TWO=RULES[second][1],
        TWO=len(paths) > 1, INDEXED=indexed, B=1024,
    )  # fmt: skip
