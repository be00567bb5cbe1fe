"""Zeroed: pruned weights are zero and stay so, as in most older methods."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from dcil.method import Method, StepContext
from dcil.optimizer_state import state_tensors
from dcil.sharding import local


@dataclass(frozen=True, kw_only=True)
class Zeroed(Method):
    """Zero the pruned weights and their optimizer state after every step.

    Without the second half their old momentum and weight decay would bring them back by accident.
    """

    def after_step(self, context: StepContext) -> None:
        super().after_step(context)
        zero_pruned(context)

    def update(self, context: StepContext) -> None:
        before = [layer.mask.clone() for layer in context.layers]
        super().update(context)
        for layer, old in zip(context.layers, before, strict=True):
            self.criterion.compensate(layer, old & ~layer.mask, context.state)
        zero_pruned(context)

    def loss_key(self, step: int) -> Hashable:
        return ()

    def update_key(self, step: int) -> Hashable:
        selection = super().update_key(step)
        return None if selection is None else ("zeroed", selection)

    def shards(self) -> bool:
        return self.criterion.shards


def zero_pruned(context: StepContext, momentum: bool = True) -> None:
    """Zero the pruned weights and, with ``momentum``, the optimizer's state of them."""
    tensors = [layer.weight.data for layer in context.layers]
    masks = [layer.mask for layer in context.layers]
    if momentum:
        for layer in context.layers:
            found = state_tensors(context.optimizer, layer.weight)
            tensors += found
            masks += [layer.mask] * len(found)
    torch._foreach_mul_([local(tensor) for tensor in tensors], [local(mask) for mask in masks])
