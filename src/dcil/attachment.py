"""Attachment: a net that counts the steps of an optimizer through its hook."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer

from dcil import wiring


class Attachment:
    """Counts the steps of the last of the optimizers for ``net``, until it is removed. A copy of the net has none."""

    def __init__(self, net: Any, optimizers: Sequence[Any], replaces: Attachment | None = None) -> None:
        found = [wiring.unwrapped(optimizer) for optimizer in optimizers]
        wiring.check_optimizer(net, found)
        if replaces is not None:
            replaces.remove()
        # Methods read the state of weights and nothing else.
        states = found[0] if len(found) == 1 else cast(Optimizer, Optimizers(found))

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if not wiring.was_skipped(optimizer):
                net.count_step(states)

        self._handle = found[-1].register_step_post_hook(after_step)

    def remove(self) -> None:
        """Count no further steps."""
        self._handle.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class States(Mapping[Tensor, Any]):
    """The states of several optimizers' parameters, as they are now: loading a state dict replaces them."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers

    def __getitem__(self, parameter: Tensor) -> Any:
        for optimizer in self.optimizers:
            if parameter in optimizer.state:  # asked first, since an optimizer's state creates what it lacks
                return optimizer.state[parameter]
        raise KeyError(parameter)

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for optimizer in self.optimizers for parameter in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self.optimizers)


class Optimizers:
    """Several optimizers as one, for what is read of them: their parameters and the state of a weight."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.state = States(optimizers)
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[Any]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]
