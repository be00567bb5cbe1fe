"""PrunableWeight: a weight with its name, its mask, and where it stores its output filters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class PrunableWeight:
    """What a method sees of a layer: ``weight`` and ``mask`` are the live tensors, changed in place.

    Linear and Conv store (out, in / groups, ...); transposed convolutions store (in, out / groups, ...).
    ``rows`` reads either as (filters, weights per filter). A ``stacked`` weight holds several matrices whose filters
    are not known.
    """

    name: str
    weight: nn.Parameter
    mask: Tensor
    transposed: bool = False
    conv_groups: int = 1
    stacked: bool = False

    @property
    def magnitude(self) -> Tensor:
        """|w|, in float32 or float64: what weights are ranked by. A square would over- or underflow."""
        return wide(self.weight.detach()).abs()

    def rows(self, values: Tensor) -> Tensor:
        """Reshape ``values``, shaped like the weight, to one row per output filter."""
        if self.transposed:
            split = (self.conv_groups, values.shape[0] // self.conv_groups, *values.shape[1:])
            values = values.reshape(split).transpose(1, 2).flatten(0, 1)
        return values.reshape(values.shape[0], -1)

    def from_rows(self, rows: Tensor) -> Tensor:
        """Reshape the result of ``rows`` back to the weight's shape."""
        shape = self.weight.shape
        if self.transposed:
            split = (self.conv_groups, shape[1], shape[0] // self.conv_groups, *shape[2:])
            rows = rows.reshape(split).transpose(1, 2)
        return rows.reshape(shape)


def wide(values: Tensor) -> Tensor:
    """The values in float32, or in float64 if they are: rankings of half precision have many ties."""
    return values if values.dtype == torch.double else values.float()
