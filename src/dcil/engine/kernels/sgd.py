"""SGD over all parameters in one kernel; ``engine/cuda/sgd.py`` has the same formulas in torch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK_SIZE = 1024


# if bad_step == 0:
#     d = grad + decay * weight
#     buffer = momentum * buffer + d
#     weight = weight - lr * (d + momentum * buffer)     (Nesterov; else lr * buffer, or lr * d without momentum)
@triton.jit
def _sgd_kernel(weight_ptr, grad_ptr, buffer_ptr, minus_lr_ptr, bad_step_ptr, size, decay, momentum,
                NESTEROV: tl.constexpr, BLOCK_SIZE: tl.constexpr):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < tl.where(tl.load(bad_step_ptr) == 0, size, 0)
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0)
    update = tl.load(grad_ptr + offsets, mask=mask, other=0.0) + decay * weight
    if buffer_ptr is not None:
        buffer = tl.load(buffer_ptr + offsets, mask=mask, other=0.0) * momentum + update
        tl.store(buffer_ptr + offsets, buffer, mask=mask)
        update = update + momentum * buffer if NESTEROV else buffer
    tl.store(weight_ptr + offsets, weight + tl.load(minus_lr_ptr) * update, mask=mask)


def step(weight: Tensor, grad: Tensor, buffer: Tensor | None, minus_lr: Tensor, bad_step: Tensor, decay: float,
         momentum: float, nesterov: bool) -> None:  # fmt: skip
    """Update ``weight`` and the momentum ``buffer`` in place, unless ``bad_step`` is not 0."""
    size = weight.numel()
    _sgd_kernel[(triton.cdiv(size, BLOCK_SIZE),)](
        weight, grad, buffer, minus_lr, bad_step, size, decay, momentum, NESTEROV=nesterov, BLOCK_SIZE=BLOCK_SIZE
    )  # fmt: skip
