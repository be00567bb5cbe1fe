"""Where the elements of torch's tensors lie in the tensors of a plan.

Operators that only move elements (permute, reshape, slice, split, roll, ...) are run on the places of the elements, at
no cost to the plan; a copy is made where a consumer needs another order (Lowering.image).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dcil.runtime.build import Value
from dcil.tracing import BATCH_SIZES

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Placed:
    """A torch tensor whose elements lie in ``value``, a plan tensor of ``shape`` (channels, height, width).

    ``index`` has the tensor's own shape at the traced batch size: element (n, ...) is item n's at ``index - n * size``,
    where ``size`` is the plan tensor's, and zero where it is negative. None: the elements lie in order.
    """

    value: Value
    shape: Shape
    index: Tensor | None = None

    def places(self, shape: Shape) -> Tensor:
        """Return the index of a tensor of this shape, also where the elements lie in order."""
        return torch.arange(math.prod(shape)).reshape(shape) if self.index is None else self.index

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def image_shape(shape: Shape) -> Shape | None:
    """Return how a plan holds a torch tensor [n, c], [n, c, w] or [n, c, h, w]; None for other ranks."""
    return {2: (*shape[1:], 1, 1), 3: (*shape[1:2], 1, *shape[2:]), 4: shape[1:]}.get(len(shape))


def is_in_order(index: Tensor) -> bool:
    return bool((index.flatten() == torch.arange(index.numel())).all())


def is_complete(index: Tensor, size: int) -> bool:
    """Return whether an index has every element of a plan tensor of ``size``, of all items, once."""
    flat = index.flatten()
    if flat.numel() != BATCH_SIZES[0] * size or bool((flat < 0).any()):
        return False
    return bool((torch.bincount(flat, minlength=flat.numel()) == 1).all())


def one_item(index: Tensor, size: int) -> Tensor | None:
    """Return the flat index of one item, of a plan tensor of ``size``; None where the batch does not come first."""
    items = index.reshape(BATCH_SIZES[0], -1)
    same = torch.where(items >= 0, items - size * torch.arange(len(items))[:, None], -1)
    return same[0] if bool((same == same[0]).all() and (same[0] < size).all()) else None


def chosen_channels(item: Tensor, shape: Shape) -> Tensor | None:
    """Return the channels that an item's index [c, h, w] consists of, if each lies in order; otherwise None."""
    pixels = shape[1] * shape[2]
    if item.shape[1:] != shape[1:]:
        return None
    channels = item[:, 0, 0] // pixels
    want = channels[:, None] * pixels + torch.arange(pixels)
    return channels if torch.equal(item.flatten(1), want) else None


@dataclass(frozen=True, eq=False)
class Tokens:
    """An index [..., c] whose last dimension is a pixel's channels: ``pixels`` has the other dimensions and counts the
    pixels of all items, ``channels`` are those of every pixel."""

    pixels: Tensor
    channels: Tensor

    def index(self, channels: int, pixels: int) -> Tensor:
        """Return the index of the same pixels in a plan tensor with so many channels and pixels."""
        item, pixel = self.pixels // pixels, self.pixels % pixels
        return (item * (channels * pixels) + pixel)[..., None] + torch.arange(channels) * pixels


def tokens_of(index: Tensor, shape: Shape) -> Tokens | None:
    """Return the index as tokens of a plan tensor of ``shape``; None where the last dimension is something else."""
    size, pixels = math.prod(shape), shape[1] * shape[2]
    if index.ndim < 2 or bool((index < 0).any()):
        return None
    channels = index % size // pixels
    first = channels.reshape(-1, index.shape[-1])[0]
    where = index - channels * pixels
    if not bool((channels == first).all() and (where == where[..., :1]).all()):
        return None
    where = where[..., 0]
    return Tokens(where // size * pixels + where % size, first)
