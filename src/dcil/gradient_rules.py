"""Gradient rules apart from values: a value with the gradient of another tensor, a gradient without a value.

What no view of ``views.py`` expresses, in plain autograd; both are exact, since x - x = 0.
"""

from __future__ import annotations

from torch import Tensor


def carry(value: Tensor, rule: Tensor) -> Tensor:
    """``value`` with dL/dW of ``rule``, another tensor made of W."""
    return value.detach() + (rule - rule.detach())


def add_gradient(loss: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    """``loss`` with ``gradient`` added to dL/dW: whatever scales or averages the loss does so with it."""
    return loss + ((weight - weight.detach()) * gradient.detach()).sum().to(loss)
