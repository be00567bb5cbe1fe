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
    """Return the loss per image and the gradient of ``logits``."""
    log_probs = _log_softmax(logits, mask)
    loss = -tl.sum(tl.where(is_target, log_probs, 0.0), 1)
    grad = tl.exp(log_probs) - tl.where(is_target, 1.0, 0.0)
    log_q, log_p = _log_softmax(logits / temperature, mask), _log_softmax(teacher_logits / temperature, mask)
    teacher_probs = tl.exp(log_p)
    divergence = tl.where(mask, teacher_probs * (log_p - log_q), 0.0)
    loss += kl * temperature * temperature * tl.sum(divergence, 1)
    grad += kl * temperature * (tl.exp(log_q) - teacher_probs)
    return loss, grad


# for each image r:
#     loss[r] = (CE(p[r]) + CE(s[r]) + kl T^2 (KL(s || p; T) + KL(p || s; T))) / images
#     dp[r], ds[r] = the gradients of loss[r], each path's teacher constant
@triton.jit
def _dcil_loss_kernel(p_ptr, s_ptr, target_ptr, loss_ptr, dp_ptr, ds_ptr, num_rows, num_classes, kl, temperature,
                      BLOCK_ROWS: tl.constexpr, BLOCK_CLASSES: tl.constexpr):  # fmt: skip
    rows, classes = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_CLASSES)
    row_mask = rows < num_rows
    mask = row_mask[:, None] & (classes < num_classes)[None, :]
    offsets = rows[:, None] * num_classes + classes[None, :]
    # Rows behind the last image are computed too and not stored: a row without any class would be NaN.
    class_mask = (classes < num_classes)[None, :] & (rows >= 0)[:, None]
    p = tl.load(p_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(s_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    is_target = classes[None, :] == tl.load(target_ptr + rows, mask=row_mask, other=0)[:, None]
    loss_p, grad_p = _path_loss(p, s, is_target, class_mask, kl, temperature)
    loss_s, grad_s = _path_loss(s, p, is_target, class_mask, kl, temperature)
    tl.store(loss_ptr + rows, (loss_p + loss_s) / num_rows, mask=row_mask)
    tl.store(dp_ptr + offsets, grad_p / num_rows, mask=mask)
    tl.store(ds_ptr + offsets, grad_s / num_rows, mask=mask)


class _Loss(Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor, s: Tensor, target: Tensor, kl: float, temperature: float) -> Tensor:
        num_rows, num_classes = p.shape
        block_classes = triton.next_power_of_2(num_classes)
        block_rows = max(1, min(16, 4096 // block_classes))
        loss = torch.empty(num_rows, device=p.device)
        dp, ds = torch.empty(2, num_rows, num_classes, device=p.device)
        _dcil_loss_kernel[(triton.cdiv(num_rows, block_rows),)](
            p.contiguous(), s.contiguous(), target, loss, dp, ds, num_rows, num_classes, kl, temperature,
            BLOCK_ROWS=block_rows, BLOCK_CLASSES=block_classes,
        )  # fmt: skip
        ctx.save_for_backward(dp, ds)
        ctx.dtypes = p.dtype, s.dtype
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        dp, ds = ((d * grad).to(dtype) for d, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return dp, ds, None, None, None


def dcil_loss(p: Tensor, s: Tensor, target: Tensor, kl: float, temperature: float) -> Tensor:
    """Return CE(p) + CE(s) + kl T^2 (KL(s || p; T) + KL(p || s; T)) of logits (images, classes), teachers constant."""
    loss: Tensor = _Loss.apply(p, s, target, kl, temperature)
    return loss
