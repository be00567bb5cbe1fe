"""One prunable weight: its name, its values, its mask, and where it keeps its output filters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Layer:
    """What a method sees of a network: ``weight`` and ``mask`` are the live tensors, changed in place.

    Linear and Conv store (out, in / groups, ...); transposed convolutions store (in, out / groups, ...).
    ``rows`` reads either as (filters, weights per filter).
    """

    name: str
    weight: nn.Parameter
    mask: Tensor
    transposed: bool = False
    conv_groups: int = 1

    def rows(self, values: Tensor) -> Tensor:
        """``values``, shaped like the weight, as one row per output filter."""
        if self.transposed:
            split = (self.conv_groups, values.shape[0] // self.conv_groups, *values.shape[1:])
            values = values.reshape(split).transpose(1, 2).flatten(0, 1)
        return values.reshape(values.shape[0], -1)

    def fold(self, rows: Tensor) -> Tensor:
        """The inverse of ``rows``: back to the weight's shape."""
        shape = self.weight.shape
        if self.transposed:
            split = (self.conv_groups, shape[1], shape[0] // self.conv_groups, *shape[2:])
            rows = rows.reshape(split).transpose(1, 2)
        return rows.reshape(shape)
