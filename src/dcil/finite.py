"""Finite weights: NaN and infinity have no rank, so a mask update refuses them, and gradients that are all zero."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dcil.checks import Arrival
from dcil.errors import Diverged, UserError
from dcil.method import Method, StepContext
from dcil.sharding import add_up_each, is_sharded, local
from dcil.weight import PrunableWeight, wide

#: The name of a tensor that was read, and what it is: 0 the weight, 1 … what is read besides it, GRADIENT, OTHER.
Place = tuple[str, int]
#: The gradient of a prunable weight, and of any other parameter: they tell why there is nothing but zeros.
GRADIENT, OTHER = -1, -2


class FiniteCheck:
    """Checks what a mask update reads.

    Where reading from the device costs nothing (the CPU, sharded weights, methods that need the host) the update is
    refused before it changes anything. On a GPU nobody waits: the result is read when it has arrived, at a later update
    or when the sparsity is asked for. NaN counts as infinite meanwhile, so the masks are as sparse as they should be.
    """

    def __init__(self) -> None:
        self.arriving: tuple[list[Place], int, Arrival] | None = None

    def __reduce__(self) -> tuple[type[FiniteCheck], tuple[()]]:
        return FiniteCheck, ()  # an event cannot be copied

    def before_update(self, method: Method, context: StepContext) -> None:
        """Refuse an update that would rank what is not finite, or zeros alone."""
        read = {
            (layer.name, number): tensor
            for layer in context.layers
            for number, tensor in enumerate(method.reads(layer, context))
        }
        if any(number for _, number in read):
            read |= gradients(context)
        places, tensors = list(read), list(read.values())
        found = examine(tensors)
        if not found.is_cuda or method.update_key(context.step) is None or any(map(is_sharded, tensors)):
            refuse(places, context.step, found)
            return
        self.settle(wait=False)
        if self.arriving is None:
            self.arriving = (places, context.step, Arrival(found))

    def settle(self, wait: bool = True) -> None:
        """Refuse what an earlier update read, as soon as it is known; ``wait`` for that."""
        if self.arriving is None or not (wait or self.arriving[2].here()):
            return
        (places, step, arrival), self.arriving = self.arriving, None
        refuse(places, step, arrival.wait())

    def weights(self, layers: Sequence[PrunableWeight], step: int) -> None:
        """Refuse weights that are not finite, pruned ones included (waits for the device)."""
        self.settle()
        refuse([(layer.name, 0) for layer in layers], step, examine([layer.weight.detach() for layer in layers]))


def gradients(context: StepContext) -> dict[Place, Tensor]:
    """The gradients that the parameters of the network have."""
    pruned = {id(layer.weight) for layer in context.layers}
    found = {(name, GRADIENT if id(p) in pruned else OTHER): p.grad for name, p in context.model.named_parameters()}
    return {place: g for place, g in found.items() if g is not None and g.is_floating_point() and not g.is_sparse}


def examine(tensors: Sequence[Tensor]) -> Tensor:
    """For each tensor, over all processes, whether it has NaN or infinite values, and whether others than zero."""
    parts = [part if part.numel() else part.new_zeros(1) for part in map(local, tensors)]  # a process may hold none
    largest = torch._foreach_norm(parts, torch.inf)  # a few kernels for all; cannot overflow
    sizes = torch.stack([wide(size).to(largest[0].device) for size in largest])
    return torch.stack([add_up_each(flags.long(), tensors) for flags in (~sizes.isfinite(), sizes != 0)])


def refuse(places: Sequence[Place], step: int, found: Tensor) -> None:
    """Refuse the first of the tensors that is broken, and what is zero in every layer."""
    broken, filled = found.tolist()
    for (name, number), count in zip(places, broken, strict=True):
        if count and number >= 0:
            raise Diverged(
                f"the weights and gradients must be finite, {name} has NaN or infinite values at step {step}: go back "
                "to an earlier state dict, and lower the learning rate, clip the gradients or skip such batches"
            )
    nonzero = {number for (_, number), count in zip(places, filled, strict=True) if count}
    # Gradients of other parameters alone: nothing passes the network any more, of which its emptied layers warned.
    collapsed = OTHER in nonzero and GRADIENT not in nonzero
    if {number for _, number in places if number > 0} - nonzero and not collapsed:
        raise UserError(
            "the gradients or the momentum that masks are chosen by must not be zero in every layer, got zeros at step "
            f"{step}: call net.step after backward() and before zero_grad()"
        )
