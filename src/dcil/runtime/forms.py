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


def image_shape(shape: Shape) -> Shape | None:
    """Return how a plan holds a torch tensor [n, c], [n, c, w] or [n, c, h, w]; None for other ranks."""
    return {2: (*shape[1:], 1, 1), 3: (*shape[1:2], 1, *shape[2:]), 4: shape[1:]}.get(len(shape))


def channels_first(index: Tensor, last: bool) -> Tensor:
    """Return an index [n, c, ...], or with ``last`` [n, ..., c], as [n, c, pixels] with the traced batch size."""
    if last:
        return index.reshape(BATCH_SIZES[0], -1, index.shape[-1]).movedim(-1, 1)
    return index.reshape(BATCH_SIZES[0], index.shape[1] * index.shape[0] // BATCH_SIZES[0], -1)


def is_in_order(index: Tensor) -> bool:
    return bool((index.flatten() == torch.arange(index.numel())).all())


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
