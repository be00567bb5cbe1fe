"""Loading: a state dict is loaded as a whole, or refused in one line and nothing has changed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dcil.errors import UserError, described
from dcil.identity import StateError


@contextmanager
def fitting(net: Any, part: nn.Module, state_dict: object, what: str) -> Iterator[None]:
    """Surround the loading of a state dict into ``part`` of the net: say in one line what does not fit."""
    if not isinstance(state_dict, Mapping) or not all(isinstance(name, str) for name in state_dict):
        raise StateError(f"the state dict must be a mapping from names to tensors, got {described(state_dict)}")
    before = None if has_names_and_shapes(part, state_dict) else Snapshot(net)  # torch copies first and refuses then
    try:
        yield
    except Exception as error:
        if before is not None:
            before.restore()
        foreign = isinstance(error, (UserError, torch.OutOfMemoryError))
        if foreign or not isinstance(error, (RuntimeError, AttributeError, TypeError)):
            raise
        text = " ".join(str(error).split())
        text = re.sub(r"^Error\(s\) in loading state_dict for \w+: ", "", text)
        raise StateError(
            f"the state dict must fit {what}, got: {text[:400]}{'…' if len(text) > 400 else ''}"
        ) from error


def has_names_and_shapes(module: nn.Module, state_dict: Mapping[str, Any]) -> bool:
    """Whether the state dict has the module's names with tensors of their shapes."""
    own = module.state_dict()
    return own.keys() == state_dict.keys() and all(
        isinstance(state_dict[name], Tensor) and state_dict[name].shape == tensor.shape
        for name, tensor in own.items()
        if isinstance(tensor, Tensor) and not name.endswith("_extra_state")
    )


class Snapshot:
    """A net's tensors, copied, and where it stands in its training."""

    def __init__(self, net: Any) -> None:
        self.net, self.position = net, (net.method, net._steps_done, net._checks.empty)
        self.places = [(module, dict(module._parameters), dict(module._buffers)) for module in net.modules()]
        tensors = [t for _, *held in self.places for values in held for t in values.values() if t is not None]
        self.values = [(tensor, tensor.detach().clone()) for tensor in tensors]

    @torch.no_grad()
    def restore(self) -> None:
        for module, parameters, buffers in self.places:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        for tensor, value in self.values:
            tensor.copy_(value)
        method, self.net._steps_done, self.net._checks.empty = self.position
        self.net._set_method(method)
