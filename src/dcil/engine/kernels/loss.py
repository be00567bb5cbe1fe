"""Cross-entropy of two paths plus the mutual KL terms, with the gradient of both logits, in one kernel.

In a small network the seventy small kernels of this loss (Eq. 4 of the DCIL paper) and its backward pass take as long
as ten convolutions. For the logits p of one path and s of the other:

    d CE(p) / dp                          = softmax(p) - onehot
    d T^2 KL(s || p; T) / dp, s constant  = T (softmax(p / T) - softmax(s / T))

each divided by the number of images; for s likewise.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function


@triton.jit
def _log_softmax(logits, mask):
    logits = tl.where(mask, logits, float("-inf"))
    logits = logits - tl.max(logits, 1)[:, None]
    return logits - tl.log(tl.sum(tl.exp(logits), 1))[:, None]


@triton.jit
def _path_loss(logits, teacher_logits, is_target, mask, kl, temperature):
    """Return the cross-entropy and the KL term per image, and the gradient of ``logits``."""
    log_probs = _log_softmax(logits, mask)
    loss = -tl.sum(tl.where(is_target, log_probs, 0.0), 1)
    grad = tl.exp(log_probs) - tl.where(is_target, 1.0, 0.0)
    log_q, log_p = _log_softmax(logits / temperature, mask), _log_softmax(teacher_logits / temperature, mask)
    teacher_probs = tl.exp(log_p)
    divergence = tl.where(mask, teacher_probs * (log_p - log_q), 0.0)
    grad += kl * temperature * (tl.exp(log_q) - teacher_probs)
    return loss, kl * temperature * temperature * tl.sum(divergence, 1), grad


# for each image r that counts:
#     loss[:, r] = (CE(p[r]), CE(s[r]), kl T^2 (KL(s || p; T) + KL(p || s; T))) / images
#     dp[r], ds[r] = the gradients of their sum, each path's teacher constant
# COUNTED: images whose target is ``ignored`` do not count, and count_ptr has the number of those that do.
@triton.jit
def _dcil_loss_kernel(p_ptr, s_ptr, target_ptr, count_ptr, loss_ptr, dp_ptr, ds_ptr, num_rows, num_classes, ignored,
                      kl, temperature, COUNTED: tl.constexpr, BLOCK_ROWS: tl.constexpr,
                      BLOCK_CLASSES: tl.constexpr):  # fmt: skip
    rows, classes = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_CLASSES)
    row_mask = rows < num_rows
    mask = row_mask[:, None] & (classes < num_classes)[None, :]
    offsets = rows[:, None] * num_classes + classes[None, :]
    # Rows behind the last image are computed too and not stored: a row without any class would be NaN.
    class_mask = (classes < num_classes)[None, :] & (rows >= 0)[:, None]
    p = tl.load(p_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(s_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    target = tl.load(target_ptr + rows, mask=row_mask, other=0)
    is_target = classes[None, :] == target[:, None]
    ce_p, kl_p, grad_p = _path_loss(p, s, is_target, class_mask, kl, temperature)
    ce_s, kl_s, grad_s = _path_loss(s, p, is_target, class_mask, kl, temperature)
    kl_both = kl_p + kl_s
    images = num_rows * 1.0
    if COUNTED:
        images = tl.maximum(tl.load(count_ptr), 1) * 1.0
        counts = target != ignored
        ce_p, ce_s, kl_both = tl.where(counts, ce_p, 0.0), tl.where(counts, ce_s, 0.0), tl.where(counts, kl_both, 0.0)
        grad_p, grad_s = tl.where(counts[:, None], grad_p, 0.0), tl.where(counts[:, None], grad_s, 0.0)
    tl.store(loss_ptr + rows, ce_p / images, mask=row_mask)
    tl.store(loss_ptr + num_rows + rows, ce_s / images, mask=row_mask)
    tl.store(loss_ptr + 2 * num_rows + rows, kl_both / images, mask=row_mask)
    tl.store(dp_ptr + offsets, grad_p / images, mask=mask)
    tl.store(ds_ptr + offsets, grad_s / images, mask=mask)


class _Loss(Function):
    @staticmethod
    def forward(
        ctx: Any, p: Tensor, s: Tensor, target: Tensor, kl: float, temperature: float, ignored: int | None
    ) -> tuple[Tensor, Tensor]:
        num_rows, num_classes = p.shape
        block_classes = triton.next_power_of_2(num_classes)
        block_rows = max(1, min(16, 4096 // block_classes))
        losses = torch.empty(3, num_rows, device=p.device)
        dp, ds = torch.empty(2, num_rows, num_classes, device=p.device)
        count = target if ignored is None else (target != ignored).sum()
        _dcil_loss_kernel[(triton.cdiv(num_rows, block_rows),)](
            p.contiguous(), s.contiguous(), target, count, losses, dp, ds, num_rows, num_classes, ignored or 0, kl,
            temperature, COUNTED=ignored is not None, BLOCK_ROWS=block_rows, BLOCK_CLASSES=block_classes,
        )  # fmt: skip
        ctx.save_for_backward(dp, ds)
        ctx.dtypes = p.dtype, s.dtype
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dp, ds = ((d * grad).to(dtype) for d, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return dp, ds, None, None, None, None


def dcil_loss(
    p: Tensor, s: Tensor, target: Tensor, kl: float, temperature: float, ignored: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return CE(p) + CE(s) + kl T^2 (KL(s || p; T) + KL(p || s; T)) of logits (images, classes), teachers constant,
    and the three terms of each image. Images whose target is ``ignored`` do not count; None: all do."""
    loss, terms = _Loss.apply(p, s, target, kl, temperature, ignored)
    return loss, terms
