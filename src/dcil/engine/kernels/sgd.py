"""The update of all parameters in one kernel (Triton); sgd.py has the formulas."""

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _update(w, g, v, minus_lr, bad, size, decay, momentum, NESTEROV: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    ok = at < tl.where(tl.load(bad) == 0, size, 0)
    weight = tl.load(w + at, mask=ok, other=0.0)
    d = tl.load(g + at, mask=ok, other=0.0) + decay * weight
    if v is not None:
        speed = tl.load(v + at, mask=ok, other=0.0) * momentum + d
        tl.store(v + at, speed, mask=ok)
        d = d + momentum * speed if NESTEROV else speed
    tl.store(w + at, weight + tl.load(minus_lr) * d, mask=ok)


def step(w: Tensor, g: Tensor, v: Tensor | None, minus_lr: Tensor, bad: Tensor, decay: float, momentum: float,
         nesterov: bool) -> None:  # fmt: skip
    size = w.numel()
    _update[(triton.cdiv(size, 1024),)](w, g, v, minus_lr, bad, size, decay, momentum, NESTEROV=nesterov, B=1024)
