"""Cross-entropy of two paths plus the mutual KL terms, with the gradient of both logits, in one kernel.

In a small network the seventy small kernels of this loss (Eq. 4 of the DCIL paper) and its backward pass take as long
as ten convolutions. For the logits p of one path and s of the other:

    d CE(p) / dp                          = softmax(p) - onehot
    d T^2 KL(s || p; T) / dp, s constant  = T (softmax(p / T) - softmax(s / T))

each divided by the number of images; for s likewise. If s has the first rows alone, its terms and the KL terms are
those of these rows, divided by their number.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

FEW = 4096  # images


@triton.jit
def _log_softmax(logits, mask):
    logits = tl.where(mask, logits, float("-inf"))
    logits = logits - tl.max(logits, 1)[:, None]
    return logits - tl.log(tl.sum(tl.exp(logits), 1))[:, None]


@triton.jit
def _path_loss(logits, teacher_logits, is_target, mask, kl, temperature):
    """Return each image's cross-entropy and KL divergence, and the gradient of ``logits``; ``kl`` is one per image."""
    log_probs = _log_softmax(logits, mask)
    loss = -tl.sum(tl.where(is_target, log_probs, 0.0), 1)
    grad = tl.exp(log_probs) - tl.where(is_target, 1.0, 0.0)
    log_q, log_p = _log_softmax(logits / temperature, mask), _log_softmax(teacher_logits / temperature, mask)
    teacher_probs = tl.exp(log_p)
    divergence = tl.where(mask, teacher_probs * (log_p - log_q), 0.0)
    grad += (kl * temperature)[:, None] * (tl.exp(log_q) - teacher_probs)
    return loss, tl.sum(divergence, 1), grad


@triton.jit
def _count_targets(target_ptr, num_rows, num_shared, ignored):
    """Return how many targets count, at least 1, of all and of the first ``num_shared``."""
    counted, counted_shared = num_rows * 0, num_rows * 0
    for start in range(0, num_rows, 1024):
        rows = start + tl.arange(0, 1024)
        counts = tl.load(target_ptr + rows, mask=rows < num_rows, other=ignored) != ignored
        counted += tl.sum(counts.to(tl.int32), 0)
        counted_shared += tl.sum((counts & (rows < num_shared)).to(tl.int32), 0)
    return tl.maximum(counted, 1) * 1.0, tl.maximum(counted_shared, 1) * 1.0


# for each image r that counts, of which the first num_shared have an s:
#     loss[:, r] = (CE(p[r]) / images, CE(s[r]) / shared, kl T^2 (KL(s || p; T) + KL(p || s; T)) / shared)
#     dp[r], ds[r] = the gradients of their sum, each path's teacher constant
# COUNTED: images whose target is ``ignored`` do not count. count_ptr has the numbers of those that do, unless every
# program COUNTS_ITSELF: that is quicker than three more kernels while there are few.
@triton.jit
def _dcil_loss_kernel(p_ptr, s_ptr, target_ptr, count_ptr, loss_ptr, dp_ptr, ds_ptr, num_rows, num_shared, num_classes,
                      ignored, kl, temperature, COUNTED: tl.constexpr, COUNTS_ITSELF: tl.constexpr,
                      BLOCK_ROWS: tl.constexpr, BLOCK_CLASSES: tl.constexpr):  # fmt: skip
    rows, classes = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_CLASSES)
    row_mask = rows < num_rows
    mask = row_mask[:, None] & (classes < num_classes)[None, :]
    has_s = rows < num_shared
    mask_s = has_s[:, None] & (classes < num_classes)[None, :]
    offsets = rows[:, None] * num_classes + classes[None, :]
    # Rows behind the last image are computed too and not stored: a row without any class would be NaN.
    class_mask = (classes < num_classes)[None, :] & (rows >= 0)[:, None]
    p = tl.load(p_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(s_ptr + offsets, mask=mask_s, other=0.0).to(tl.float32)
    target = tl.load(target_ptr + rows, mask=row_mask, other=0)
    is_target = classes[None, :] == target[:, None]
    images, shared = num_rows * 1.0, num_shared * 1.0
    if COUNTS_ITSELF:
        images, shared = _count_targets(target_ptr, num_rows, num_shared, ignored)
    elif COUNTED:
        images, shared = tl.maximum(tl.load(count_ptr), 1) * 1.0, tl.maximum(tl.load(count_ptr + 1), 1) * 1.0
    # The gradient of p is divided by all images, the part of its KL term by the shared ones; on a GPU the quotient of
    # equal numbers need not be 1.
    kl_p = tl.where(has_s, kl * tl.where(images == shared, 1.0, images / shared), 0.0)
    ce_p, divergence_p, grad_p = _path_loss(p, s, is_target, class_mask, kl_p, temperature)
    ce_s, divergence_s, grad_s = _path_loss(s, p, is_target, class_mask, tl.where(has_s, kl, 0.0), temperature)
    kl_both = kl * temperature * temperature * divergence_p + kl * temperature * temperature * divergence_s
    if COUNTED:
        counts = target != ignored
        ce_p, ce_s, kl_both = tl.where(counts, ce_p, 0.0), tl.where(counts, ce_s, 0.0), tl.where(counts, kl_both, 0.0)
        grad_p, grad_s = tl.where(counts[:, None], grad_p, 0.0), tl.where(counts[:, None], grad_s, 0.0)
    tl.store(loss_ptr + rows, ce_p / images, mask=row_mask)
    tl.store(loss_ptr + num_rows + rows, tl.where(has_s, ce_s / shared, 0.0), mask=row_mask)
    tl.store(loss_ptr + 2 * num_rows + rows, tl.where(has_s, kl_both / shared, 0.0), mask=row_mask)
    tl.store(dp_ptr + offsets, grad_p / images, mask=mask)
    tl.store(ds_ptr + offsets, grad_s / shared, mask=mask_s)


class _Loss(Function):
    @staticmethod
    def forward(
        ctx: Any, p: Tensor, s: Tensor, target: Tensor, kl: float, temperature: float, ignored: int | None
    ) -> tuple[Tensor, Tensor]:
        num_rows, num_classes = p.shape
        block_classes = triton.next_power_of_2(num_classes)
        block_rows = max(1, min(16, 4096 // block_classes))
        losses = torch.empty(3, num_rows, device=p.device)
        dtype = p.dtype if p.dtype == s.dtype else torch.float32
        gradients = torch.empty(num_rows + len(s), num_classes, dtype=dtype, device=p.device)  # of both paths
        itself = ignored is not None and num_rows <= FEW
        counts = target if ignored is None or itself else count_targets(target, len(s), ignored)
        _dcil_loss_kernel[(triton.cdiv(num_rows, block_rows),)](
            p.contiguous(), s.contiguous(), target, counts, losses, gradients, gradients[num_rows:], num_rows, len(s),
            num_classes, ignored or 0, kl, temperature, COUNTED=ignored is not None, COUNTS_ITSELF=itself,
            BLOCK_ROWS=block_rows, BLOCK_CLASSES=block_classes,
        )  # fmt: skip
        ctx.save_for_backward(gradients)
        ctx.rows, ctx.dtypes = (num_rows, len(s)), (p.dtype, s.dtype)
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (gradients,) = ctx.saved_tensors
        parts = (gradients * grad).split(ctx.rows)
        dp, ds = (part.to(dtype) for part, dtype in zip(parts, ctx.dtypes, strict=True))
        return dp, ds, None, None, None, None


def dcil_loss(
    p: Tensor, s: Tensor, target: Tensor, kl: float, temperature: float, ignored: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return CE(p) + CE(s) + kl T^2 (KL(s || p; T) + KL(p || s; T)) of logits (images, classes), teachers constant,
    and the three terms of each image; ``s`` may have the first images alone. Images whose target is ``ignored`` do not
    count; None: all do."""
    loss, terms = _Loss.apply(p, s, target, kl, temperature, ignored)
    return loss, terms


def count_targets(target: Tensor, shared: int, ignored: int) -> Tensor:
    """Return how many targets count, of all and of the first ``shared``."""
    counted = target != ignored
    return torch.stack([counted.sum(), counted[:shared].sum()])
