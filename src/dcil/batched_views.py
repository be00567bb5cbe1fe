"""Batched views: the views of many weights on all paths in few operations, with the values and gradients of ``views``.

Autograd takes a handful of operations for the two views of one weight, and small networks are bound by the number of
operations. Here it is one forward, M * W, and one backward: the refined gradient of Eq. 3 in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from dcil import views
from dcil.weight import PrunableWeight

BATCHED = (views.kept, views.revived, views.straight_through, views.whole)
#: Elements of the weights that share a node: their gradients wait for each other, which must not take much memory.
TOGETHER = 2**22


def batched(paths: Mapping[str, views.View], layers: Sequence[PrunableWeight]) -> dict[str, dict[str, Tensor]]:
    """``{path: {layer.name: view(layer.weight, layer.mask)}}``."""
    if not is_plain() or any(view not in BATCHED for view in paths.values()):
        return {p: {layer.name: view(layer.weight, layer.mask) for layer in layers} for p, view in paths.items()}
    found: dict[str, dict[str, Tensor]] = {path: {} for path in paths}
    for group in together(layers) if paths else ():
        masks, weights = [layer.mask for layer in group], [layer.weight for layer in group]
        seen = iter(_Views.apply(tuple(paths.values()), masks, *weights))  # type: ignore[no-untyped-call]
        for path in paths:
            found[path].update((layer.name, next(seen)) for layer in group)
    return found


def is_plain() -> bool:
    """Whether nothing but autograd looks on: a compiler and torch.func transform the definitions instead."""
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return not (transformed or torch.compiler.is_compiling())


def together(layers: Sequence[PrunableWeight]) -> Iterator[list[PrunableWeight]]:
    """Cut the layers into groups; a large one stands alone, and frozen ones stay among themselves."""
    for frozen in (False, True):
        group: list[PrunableWeight] = []
        size = 0
        for layer in layers:
            if layer.weight.requires_grad is frozen:
                continue
            if group and size + layer.weight.numel() > TOGETHER:
                yield group
                group, size = [], 0
            group.append(layer)
            size += layer.weight.numel()
        if group:
            yield group


class _Views(Function):
    """The views of all paths, one after the other, each of all weights."""

    @staticmethod
    def forward(ctx: Any, paths: tuple[views.View, ...], masks: list[Tensor], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.paths, ctx.masks = paths, masks
        ctx.set_materialize_grads(False)
        found: list[Tensor] = []
        # On a GPU a 0 is a kernel of its own.
        zeros = {dtype: weights[0].new_zeros((), dtype=dtype) for dtype in {weight.dtype for weight in weights}}
        for view in paths:
            if view in (views.revived, views.whole):
                found += weights  # autograd makes views of what is returned as it came
            else:
                pairs = zip(weights, masks, strict=True)
                found += [torch.where(mask, weight, zeros[weight.dtype]) for weight, mask in pairs]
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        masks: list[Tensor] = ctx.masks
        of_paths = [grads[i : i + len(masks)] for i in range(0, len(grads), len(masks))]
        found = [gradient(ctx.paths, own, mask) for *own, mask in zip(*of_paths, masks, strict=True)]
        return None, None, *found


def gradient(paths: tuple[views.View, ...], grads: Sequence[Tensor | None], mask: Tensor) -> Tensor | None:
    """The gradient of a weight from those of its views."""
    if paths == (views.kept, views.revived):
        p, s = grads
        if p is not None and s is not None:
            # In the layout of the weight, which DDP asks for; what is differentiated again cannot be written there.
            if torch.is_grad_enabled() or p.stride() == s.stride() == mask.stride():
                return torch.where(mask, p, s)
            return torch.where(mask, p, s, out=torch.empty_like(mask, dtype=p.dtype))
    total: Tensor | None = None
    for view, grad in zip(paths, grads, strict=True):
        if grad is not None and view in (views.kept, views.revived):
            grad = torch.where(mask, grad, 0) if view is views.kept else torch.where(mask, 0, grad)
        if grad is not None:
            total = grad if total is None else total + grad
    return total
