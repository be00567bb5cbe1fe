"""Finite weights: NaN and infinity have no rank, so a mask update refuses them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dcil.checks import Arrival
from dcil.errors import Diverged
from dcil.method import Method, StepContext
from dcil.sharding import add_up_each, is_sharded, local
from dcil.weight import PrunableWeight, wide


class FiniteCheck:
    """Checks what a mask update reads.

    Where reading from the device costs nothing (the CPU, sharded weights, methods that need the host) the update is
    refused before it changes anything. On a GPU nobody waits: the result is read when it has arrived, at a later update
    or when the sparsity is asked for. NaN counts as infinite meanwhile, so the masks are as sparse as they should be.
    """

    def __init__(self) -> None:
        self.arriving: tuple[list[str], int, Arrival] | None = None

    def __reduce__(self) -> tuple[type[FiniteCheck], tuple[()]]:
        return FiniteCheck, ()  # an event cannot be copied

    def before_update(self, method: Method, context: StepContext) -> None:
        """Refuse an update that would rank what is not finite."""
        read = [(layer.name, tensor) for layer in context.layers for tensor in method.reads(layer, context)]
        names, tensors = [name for name, _ in read], [tensor for _, tensor in read]
        broken = count_broken(tensors)
        if not broken.is_cuda or method.update_key(context.step) is None or any(map(is_sharded, tensors)):
            refuse(names, context.step, broken)
            return
        self.settle(wait=False)
        if self.arriving is None:
            self.arriving = (names, context.step, Arrival(broken))

    def settle(self, wait: bool = True) -> None:
        """Refuse what an earlier update read, as soon as it is known; ``wait`` for that."""
        if self.arriving is None or not (wait or self.arriving[2].here()):
            return
        (names, step, arrival), self.arriving = self.arriving, None
        refuse(names, step, arrival.wait())

    def weights(self, layers: Sequence[PrunableWeight], step: int) -> None:
        """Refuse weights that are not finite, pruned ones included (waits for the device)."""
        self.settle()
        refuse([layer.name for layer in layers], step, count_broken([layer.weight.detach() for layer in layers]))


def count_broken(tensors: Sequence[Tensor]) -> Tensor:
    """For each tensor whether it has NaN or infinite values (0: none), over all processes, on the device."""
    parts = [part if part.numel() else part.new_zeros(1) for part in map(local, tensors)]  # a process may hold none
    largest = torch._foreach_norm(parts, torch.inf)  # a few kernels for all; cannot overflow
    return add_up_each((~torch.stack([wide(size) for size in largest]).isfinite()).long(), tensors)


def refuse(names: Sequence[str], step: int, broken: Tensor) -> None:
    """Refuse the first of the named tensors that is broken."""
    if broken.any():
        name = names[int(broken.nonzero()[0])]
        raise Diverged(
            f"the weights and gradients must be finite, {name} has NaN or infinite values at step {step}: go back to "
            "an earlier state dict, and lower the learning rate, clip the gradients or skip such batches"
        )
