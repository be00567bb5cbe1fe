"""Masks to start from: the zeros that weights already have, or masks that the user gives."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dcil.errors import UserError, described, unknown
from dcil.granularity import Filter
from dcil.inspection import count_groups
from dcil.method import Method
from dcil.sharding import like, whole
from dcil.weight import PrunableWeight


def take_masks(masks: str | Mapping[str, Tensor], method: Method, layers: Sequence[PrunableWeight]) -> Method:
    """Set the layers' masks; returns the method with the sparsity they have as its initial one."""
    if method.draws_masks:
        raise UserError(f"masks must be None for {type(method).__name__}, which draws its own, got {described(masks)}")
    if isinstance(masks, str) and masks != "zeros":
        raise unknown("value of masks=", masks, ["zeros"])
    if not isinstance(masks, (str, Mapping)):
        raise UserError(f"masks must be 'zeros' or a mapping from names to bool tensors, got {described(masks)}")
    if isinstance(masks, Mapping):
        check_masks(masks, layers)
    for layer in layers:
        mask = layer.weight != 0 if isinstance(masks, str) else masks.get(layer.name, layer.mask)
        layer.mask.copy_(like(mask.to(layer.mask.device), layer.mask))
    if isinstance(method.granularity, Filter) and (parts := [layer.name for layer in layers if has_parts(layer)]):
        warnings.warn(
            f"masks prune single weights of {', '.join(parts)}, which {method.granularity} brings back at the first "
            "update: it prunes whole filters",
            stacklevel=5,  # the caller of SparseNet
        )
    pruned, groups = count_groups(method, layers)
    found = min(pruned / max(1, groups), method.sparsity)
    return replace(method, initial_sparsity=max(method.initial_sparsity, found))


def has_parts(layer: PrunableWeight) -> bool:
    """Whether a filter of the layer is pruned in part."""
    rows = layer.rows(whole(layer.mask))
    return bool((rows.any(1) & ~rows.all(1)).any())


def check_masks(masks: Mapping[str, Tensor], layers: Sequence[PrunableWeight]) -> None:
    known = {layer.name: layer for layer in layers}
    for name, mask in masks.items():
        if name not in known:
            raise unknown("weight in masks=", str(name), known)
        if not isinstance(mask, Tensor):
            raise UserError(f"masks[{name!r}] must be a bool tensor (True = kept), got {type(mask).__name__}")
        dense = mask.layout == torch.strided and not mask.is_meta
        if mask.dtype != torch.bool or mask.shape != known[name].weight.shape or not dense:
            raise UserError(
                f"masks[{name!r}] must be a bool tensor of shape {tuple(known[name].weight.shape)} (True = kept), got "
                f"{mask.dtype} of shape {tuple(mask.shape)}{'' if dense else f', {mask.layout} on {mask.device}'}"
            )
