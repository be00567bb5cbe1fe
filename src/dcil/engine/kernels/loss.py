"""DCIL's loss and its gradient for both logits in one kernel (Triton): in a small network, the seventy small kernels of
Eq. 4 and its backward pass would take as long as ten convolutions.

    d CE(p) / dp                          = softmax(p) - onehot
    d T^2 KL(s || p; T) / dp, s constant  = T (softmax(p / T) - softmax(s / T))

each divided by the number of images; for s likewise.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from torch.autograd import Function


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _log_softmax(z, ok):  # type: ignore[no-untyped-def]
    z = tl.where(ok, z, float("-inf"))
    z = z - tl.max(z, 1)[:, None]
    return z - tl.log(tl.sum(tl.exp(z), 1))[:, None]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _share(own, other, hit, ok, kl, temperature):  # type: ignore[no-untyped-def]
    """Loss per image and gradient of the net with the logits ``own``."""
    plain = _log_softmax(own, ok)
    loss = -tl.sum(tl.where(hit, plain, 0.0), 1)
    grad = tl.exp(plain) - tl.where(hit, 1.0, 0.0)
    log_q, log_p = _log_softmax(own / temperature, ok), _log_softmax(other / temperature, ok)
    teacher = tl.exp(log_p)
    apart = tl.where(ok, teacher * (log_p - log_q), 0.0)
    loss += kl * temperature * temperature * tl.sum(apart, 1)
    grad += kl * temperature * (tl.exp(log_q) - teacher)
    return loss, grad


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _dcil(p, s, target, loss, dp, ds, images, classes, kl, temperature, R: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    r, c = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, C)
    rows = r < images
    ok = rows[:, None] & (c < classes)[None, :]
    at = r[:, None] * classes + c[None, :]
    known = (c < classes)[None, :] & (r >= 0)[:, None]  # rows behind the last image are computed too, and dropped
    one = tl.load(p + at, mask=ok, other=0.0).to(tl.float32)
    two = tl.load(s + at, mask=ok, other=0.0).to(tl.float32)
    hit = c[None, :] == tl.load(target + r, mask=rows, other=0)[:, None]
    loss_p, grad_p = _share(one, two, hit, known, kl, temperature)
    loss_s, grad_s = _share(two, one, hit, known, kl, temperature)
    tl.store(loss + r, (loss_p + loss_s) / images, mask=rows)
    tl.store(dp + at, grad_p / images, mask=ok)
    tl.store(ds + at, grad_s / images, mask=ok)


class _Loss(Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor, s: Tensor, target: Tensor, kl: float, temperature: float) -> Tensor:
        images, classes = p.shape
        wide = triton.next_power_of_2(classes)
        rows = max(1, min(16, 4096 // wide))
        loss = torch.empty(images, device=p.device)
        dp, ds = torch.empty(2, images, classes, device=p.device)
        _dcil[(triton.cdiv(images, rows),)](
            p.contiguous(), s.contiguous(), target, loss, dp, ds, images, classes, kl, temperature, R=rows, C=wide
        )  # fmt: skip
        ctx.save_for_backward(dp, ds)
        ctx.dtypes = p.dtype, s.dtype
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        found = [(g * grad).to(dtype) for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return found[0], found[1], None, None, None


def dcil_loss(p: Tensor, s: Tensor, target: Tensor, kl: float, temperature: float) -> Tensor:
    """CE(p) + CE(s) + kl T^2 (KL(s || p; T) + KL(p || s; T)) of logits (images, classes), teachers constant."""
    found: Tensor = _Loss.apply(p, s, target, kl, temperature)  # type: ignore[no-untyped-call]
    return found
