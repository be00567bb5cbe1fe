"""Cut parameters, resize layers, select and widen channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Cut:
    """Cuts a parameter of the small network from one of the large: rows, columns, then ``extra`` columns of 0."""

    source: str
    rows: Tensor | None = None  # None: all
    columns: Tensor | None = None
    extra: int = 0

    def __call__(self, values: Tensor) -> Tensor:
        if self.rows is None:
            return values.clone()
        values = values.index_select(0, self.rows.to(values.device))
        if self.columns is None:
            return values
        values = values.index_select(1, self.columns.to(values.device))
        return torch.cat([values, values.new_zeros(len(values), self.extra, *values.shape[2:])], 1)


class Select(nn.Module):
    """Selects channels, in a given order."""

    order: Tensor

    def __init__(self, order: Tensor) -> None:
        super().__init__()
        self.register_buffer("order", order)

    def forward(self, x: Tensor) -> Tensor:
        return x.index_select(1, self.order)


class Widen(nn.Module):
    """Inserts constant channels between those of x."""

    order: Tensor
    fill: Tensor

    def __init__(self, order: Tensor, fill: Tensor) -> None:
        super().__init__()
        self.register_buffer("order", order)
        self.register_buffer("fill", fill)  # (1, constant channels, 1, ...)

    def forward(self, x: Tensor) -> Tensor:
        fill = self.fill.expand(x.shape[0], -1, *x.shape[2:])
        return torch.cat([x, fill], 1).index_select(1, self.order)


def bias_of(module: Any, rows: Tensor) -> Tensor | None:
    return None if module.bias is None else module.bias.detach().double()[rows]


def resize(module: Any, weight: Tensor, bias: Tensor | None) -> None:
    """Replace weight and bias of a Conv or Linear."""
    outputs, inputs = (
        ("out_features", "in_features") if isinstance(module, nn.Linear) else ("out_channels", "in_channels")
    )
    setattr(module, outputs, weight.shape[0])
    setattr(module, inputs, weight.shape[1])
    old = module.weight
    module.weight = nn.Parameter(weight.to(old.dtype), old.requires_grad)
    module.bias = None if bias is None else nn.Parameter(bias.to(old.dtype), old.requires_grad)


def replace(module: nn.Module, key: str, values: Tensor) -> None:
    old = getattr(module, key)
    setattr(module, key, nn.Parameter(values, old.requires_grad) if isinstance(old, nn.Parameter) else values)


def attribute(module: nn.Module, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module
