"""Sharding: tensors of which each process holds a part (DTensor), as FSDP2 and tensor parallel make of the weights.

A mask is sharded exactly as its weight, so what is elementwise works on the parts as they are. A number that is read
back is not: torch gives the sum of a sharded tensor as this process's part of it. Count with ``count_true``.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether the tensor is a DTensor. Its module takes a second to import and is there where DTensors are."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This process's part, sharing its memory; a plain tensor as it is."""
    return tensor.to_local().detach() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The gathered tensor; a plain one as it is. Every process must call it."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.full_tensor()


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """``tensor`` as ``other`` is held: this process's part where that is sharded, whole where that is not."""
    if not is_sharded(other):
        return whole(tensor)
    if is_sharded(tensor) and same_layout(tensor, other):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh = other.device_mesh
    everywhere = DTensor.from_local(whole(tensor), mesh, [Replicate()] * mesh.ndim, run_check=False)
    part: Tensor = everywhere.redistribute(placements=other.placements)  # without communication
    return part.clone()  # it was a view that kept the whole in memory


def same_layout(a: DTensor, b: DTensor) -> bool:
    """Whether each process holds the same part of both."""
    return a.device_mesh == b.device_mesh and a.placements == b.placements


def is_distributed() -> bool:
    """Whether there are several processes, so that tensors may be sharded: asked before every tensor is."""
    return dist.is_available() and dist.is_initialized()


def must_follow(tensor: Tensor, weight: Tensor) -> bool:
    """Whether the weight has been sharded, or sharded further, since ``tensor`` was placed as it.

    The other way round it is only gathered for the time of a forward pass.
    """
    if not is_sharded(weight):
        return False
    return not is_sharded(tensor) or weight.device_mesh.ndim > tensor.device_mesh.ndim


# -- counting --------------------------------------------------------------------------------------------------------


def layout(tensor: Tensor) -> Hashable:
    """What ``add_up`` depends on: the mesh and the dimensions of it that shard the tensor; None of a plain tensor."""
    if not is_sharded(tensor):
        return None
    return tensor.device_mesh, tuple(not placement.is_replicate() for placement in tensor.placements)


def add_up(counts: Tensor, like: Tensor) -> Tensor:
    """Sum what each process counted in its part of ``like``; replicas of a part count once."""
    if is_sharded(like):
        for dim, placement in enumerate(like.placements):
            if not placement.is_replicate():
                dist.all_reduce(counts, group=like.device_mesh.get_group(dim))
    return counts


def count_true(masks: Sequence[Tensor]) -> Tensor:
    """How many elements of each mask are True, over all processes; on the device, a plain tensor."""
    return add_up_each(torch.stack([local(mask).count_nonzero() for mask in masks]), masks)


def add_up_each(counts: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """``add_up`` of each count with the tensor that was counted, one reduction for all that are sharded alike."""
    for key in dict.fromkeys(map(layout, tensors)):
        same = [i for i, tensor in enumerate(tensors) if layout(tensor) == key]
        if key is not None:
            counts[same] = add_up(counts[same], tensors[same[0]])
    return counts


class Counts:
    """Counts of masks, remembered while they do not change: what all processes counted, one may read alone."""

    def __init__(self) -> None:
        self.versions: list[tuple[int, int]] = []
        self.counts: Tensor | None = None

    def of(self, masks: Sequence[Tensor]) -> Tensor:
        """``count_true(masks)``."""
        if not any(map(is_sharded, masks)):  # counted at once; and a recorded update changes no version
            return count_true(masks)
        versions = [(id(mask), mask._version) for mask in masks]  # a part's own version does not change
        if self.counts is None or versions != self.versions:
            self.versions, self.counts = versions, count_true(masks)
        return self.counts
