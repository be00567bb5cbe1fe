"""Both KL terms of Eq. 4 at once, a part of the batch at a time, so that the logits are never whole in float.

With q = softmax(s / T) and r = softmax(p / T), and each path's teacher constant:

    T^2 { KL(s || p; T) + KL(p || s; T) }  =  T^2 sum (q - r) (log q - log r)
    d / dp  =  T (r - q)  =  - d / ds

The backward pass needs one difference, which is kept in the precision of the logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

#: Values of the logits that are in float at a time.
CHUNK = 2**24


def mutual_kl(p: Tensor, s: Tensor, temperature: float, dim: int = 1, counted: Tensor | None = None) -> Tensor:
    """T^2 { KL(s || p; T) + KL(p || s; T) } of softmax over ``dim``, summed over the positions that are ``counted``.

    ``counted`` has the shape of the logits without ``dim``; None counts all.
    """
    if dim % p.dim() == 0:  # the parts are cut along the first dimension
        p, s, dim = p.movedim(0, -1), s.movedim(0, -1), -1
    found: Tensor = _MutualKL.apply(p, s, temperature, dim, counted)  # type: ignore[no-untyped-call]
    return found


def log_softmax(logits: Tensor, temperature: float, dim: int) -> Tensor:
    """log softmax(logits / T) in float at least: similar distributions differ by less than half precision resolves."""
    wide = logits if logits.dtype == torch.double else logits.float()
    return F.log_softmax(wide / temperature, dim)


def divergence(p: Tensor, s: Tensor, temperature: float, dim: int, counted: Tensor | None) -> tuple[Tensor, Tensor]:
    """q - r, and sum (q - r) (log q - log r)."""
    log_r, log_q = log_softmax(p, temperature, dim), log_softmax(s, temperature, dim)
    difference, terms = log_q.exp().sub_(log_r.exp()), log_q.sub_(log_r)
    if counted is not None:  # not a product: a position that does not count may hold inf or NaN
        ignored = ~counted.unsqueeze(dim)
        difference.masked_fill_(ignored, 0), terms.masked_fill_(ignored, 0)
    return difference, terms.mul_(difference).sum()


class _MutualKL(Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor, s: Tensor, temperature: float, dim: int, counted: Tensor | None) -> Tensor:
        ctx.temperature, ctx.dim, ctx.counted = temperature, dim, counted
        rows = max(1, CHUNK * len(p) // max(1, p.numel()))
        if rows >= len(p):  # the usual case, in the fewest operations
            difference, total = divergence(p, s, temperature, dim, counted)
            differences = difference.to(p.dtype)
        else:
            differences = torch.empty_like(p)
            total = torch.zeros((), dtype=torch.promote_types(p.dtype, torch.float), device=p.device)
            for start in range(0, len(p), rows):
                part = slice(start, start + rows)
                of_part = None if counted is None else counted[part]
                differences[part], terms = divergence(p[part], s[part], temperature, dim, of_part)
                total += terms
        ctx.save_for_backward(p, s, differences)
        return total * temperature**2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        p, s, difference = ctx.saved_tensors
        if not torch.is_grad_enabled():
            back = difference * (grad * ctx.temperature)
            return -back, back, None, None, None
        # Differentiated again: the difference as a function of each path, its teacher constant.
        r, q = (log_softmax(logits, ctx.temperature, ctx.dim).exp() for logits in (p, s))
        if ctx.counted is not None:
            r, q = (torch.where(ctx.counted.unsqueeze(ctx.dim), share, 0) for share in (r, q))
        dp, ds = (grad * ctx.temperature * (own - other.detach()) for own, other in ((r, q), (q, r)))
        return dp.to(p.dtype), ds.to(s.dtype), None, None, None
