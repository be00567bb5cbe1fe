"""What most older methods do with a pruned weight: it is zero, and nothing moves it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from dcil.method import Method, StepContext
from dcil.optimizer_state import slots


@dataclass(frozen=True, kw_only=True)
class Zeroed(Method):
    """Pruned weights are zero after every step, and the optimizer forgets them.

    Without the second half their old momentum and weight decay would bring them back by accident.
    """

    def after_step(self, now: StepContext) -> None:
        super().after_step(now)
        zero_pruned(now)

    def update(self, now: StepContext) -> None:
        before = [layer.mask.clone() for layer in now.layers]
        super().update(now)
        for layer, old in zip(now.layers, before, strict=True):
            self.criterion.compensate(layer, old & ~layer.mask, now.state)
        zero_pruned(now)

    def update_form(self, step: int) -> Hashable:
        return self.sparsity_at(step) if type(self).update is Zeroed.update and self.scores_on_device else None


def zero_pruned(now: StepContext, momentum: bool = True) -> None:
    """Write the zeros, into the weights and, with ``momentum``, into the optimizer's memory of them."""
    tensors = [layer.weight.data for layer in now.layers]
    masks = [layer.mask for layer in now.layers]
    if momentum:
        for layer in now.layers:
            found = slots(now.optimizer, layer.weight)
            tensors += found
            masks += [layer.mask] * len(found)
    torch._foreach_mul_(tensors, masks)
