"""The views of all weights, and the gradient of all weights from those of their views, in one kernel each.

The views of ``dcil.views`` are elementwise, so their values and gradient rules are written down again here:

    view               value   gradient that reaches the weight
    kept               m w     m g
    revived            w       (1 - m) g
    straight_through   m w     g
    whole              w       g
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcil import views

BLOCK_SIZE = 1024
#: View -> (is the value masked, which weights the gradient reaches: 0 all, 1 the kept ones, 2 the pruned ones).
RULES: dict[views.View, tuple[bool, int]] = {
    views.kept: (True, 1),
    views.revived: (False, 2),
    views.straight_through: (True, 0),
    views.whole: (False, 0),
}


# values[index[i]] = weight[i] * mask[i] if MASKED else weight[i]        (values[i] unless INDEXED)
@triton.jit
def _view_kernel(weight_ptr, mask_ptr, index_ptr, values_ptr, size,
                 MASKED: tl.constexpr, INDEXED: tl.constexpr, BLOCK_SIZE: tl.constexpr):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < size
    value = tl.load(weight_ptr + offsets, mask=mask, other=0.0)
    if MASKED:
        kept = tl.load(mask_ptr + offsets, mask=mask, other=0) != 0
        value = tl.where(kept, value, value * 0.0)  # a product, not 0: NaN stays NaN
    out_offsets = tl.load(index_ptr + offsets, mask=mask, other=0) if INDEXED else offsets
    tl.store(values_ptr + out_offsets, value.to(values_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _masked_gradient(grad_ptr, index_ptr, kept, offsets, mask, RULE: tl.constexpr, INDEXED: tl.constexpr):
    """Load the gradient of a view, zero where it does not reach the weight."""
    grad_offsets = tl.load(index_ptr + offsets, mask=mask, other=0) if INDEXED else offsets
    grad = tl.load(grad_ptr + grad_offsets, mask=mask, other=0.0).to(tl.float32)
    if RULE == 1:
        grad = tl.where(kept, grad, 0.0)
    if RULE == 2:
        grad = tl.where(kept, 0.0, grad)
    return grad


# out[i] = rule_a(mask[i]) * grad_a[index_a[i]] + rule_b(mask[i]) * grad_b[index_b[i]]        (b only if TWO_PATHS)
@triton.jit
def _weight_gradient_kernel(grad_a_ptr, grad_b_ptr, index_a_ptr, index_b_ptr, mask_ptr, out_ptr, size,
                            RULE_A: tl.constexpr, RULE_B: tl.constexpr, TWO_PATHS: tl.constexpr,
                            INDEXED: tl.constexpr, BLOCK_SIZE: tl.constexpr):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < size
    kept = tl.load(mask_ptr + offsets, mask=mask, other=0) != 0
    grad = _masked_gradient(grad_a_ptr, index_a_ptr, kept, offsets, mask, RULE_A, INDEXED)
    if TWO_PATHS:
        grad += _masked_gradient(grad_b_ptr, index_b_ptr, kept, offsets, mask, RULE_B, INDEXED)
    tl.store(out_ptr + offsets, grad, mask=mask)


def write_view(view: views.View, weights: Tensor, masks: Tensor, index: Tensor | None, out: Tensor) -> None:
    """Write the value of ``view``, in the precision of ``out``, to the places ``index`` of ``out`` (None: in order)."""
    size, bits = masks.numel(), masks.view(torch.uint8)
    _view_kernel[(triton.cdiv(size, BLOCK_SIZE),)](
        weights, bits, bits if index is None else index, out, size,
        MASKED=RULES[view][0], INDEXED=index is not None, BLOCK_SIZE=BLOCK_SIZE,
    )  # fmt: skip


def weight_gradient(paths: Sequence[tuple[views.View, Tensor, Tensor | None]], masks: Tensor, out: Tensor) -> None:
    """Sum what one or two paths contribute to the gradient of the weights; each is (view, its gradient, index)."""
    (view_a, grad_a, index_a), (view_b, grad_b, index_b) = paths[0], paths[-1]
    size, bits = masks.numel(), masks.view(torch.uint8)
    indices = (bits, bits) if index_a is None or index_b is None else (index_a, index_b)
    _weight_gradient_kernel[(triton.cdiv(size, BLOCK_SIZE),)](
        grad_a, grad_b, *indices, bits, out, size, RULE_A=RULES[view_a][1], RULE_B=RULES[view_b][1],
        TWO_PATHS=len(paths) > 1, INDEXED=index_a is not None, BLOCK_SIZE=BLOCK_SIZE,
    )  # fmt: skip
