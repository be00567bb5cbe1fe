"""Slots: fixed memory for the inputs of a recording, whatever they are made of."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

#: Values that a recording may depend on: it is then one for each of them.
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


MAX_SHAPES = 8  # structures and shapes of inputs that have slots


class Unrecordable(Exception):
    """Why a step cannot be recorded; ``once``: the others can."""

    def __init__(self, reason: str, once: bool = False) -> None:
        super().__init__(reason)
        self.once = once


class Slots:
    """Copies inputs to memory that stays the same for the same structure, shapes and types."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kept: dict[Hashable, list[Tensor]] = {}

    def fill(self, value: Any) -> tuple[Hashable, Any]:
        """Return what identifies inputs like ``value``, and the same value in their memory; nothing waits."""
        tensors: list[Tensor] = []
        key = (structure(value, tensors), tuple((t.dtype, t.shape, t.stride()) for t in tensors))
        if key not in self.kept:
            if len(self.kept) == MAX_SHAPES:
                numbers = "inputs have more than 8 shapes, or numbers that change: pad them, pass numbers as tensors"
                raise Unrecordable(numbers, once=True)
            self.kept[key] = [torch.empty_like(tensor, device=self.device) for tensor in tensors]
        slots = self.kept[key]
        for slot, tensor in zip(slots, tensors, strict=True):
            slot.copy_(tensor, non_blocking=True)
        return key, rebuilt(value, iter(slots))


def structure(value: Any, tensors: list[Tensor]) -> Hashable:
    """Return what ``value`` is made of besides tensors, which are appended to ``tensors``."""
    if isinstance(value, Tensor):
        if type(value) is not Tensor or value.layout is not torch.strided or value.requires_grad:
            raise Unrecordable(f"an input is a {type(value).__name__} that is sparse, or has a gradient")
        tensors.append(value)
        return Tensor
    if isinstance(value, (tuple, list)):
        return type(value), tuple(structure(item, tensors) for item in value)
    if isinstance(value, Mapping):
        return type(value), tuple((key, structure(item, tensors)) for key, item in value.items())
    if isinstance(value, PLAIN):
        return value
    raise Unrecordable(f"an input is a {type(value).__name__}, which may change without a trace")


def rebuilt(value: Any, tensors: Any) -> Any:
    """Return ``value`` with other tensors in it."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, (tuple, list)):
        items = [rebuilt(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        return type(value)({key: rebuilt(item, tensors) for key, item in value.items()})  # type: ignore[call-arg]
    return value
