"""Naming: modules and buffers kept under the names that a user's model has for them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Nested(nn.Module):
    """Holds modules and buffers under dotted names, ``layer1.0.bn1``, nested as they are in the user's model."""

    def place(self, name: str) -> tuple[nn.Module, str]:
        """The innermost module for ``name``, created if there is none, and the last part of the name."""
        module: nn.Module = self
        *parents, last = name.split(".")
        for part in parents:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        return module, last

    def put(self, name: str, value: nn.Module | Tensor) -> None:
        """Add a module, or a tensor as a buffer."""
        module, last = self.place(name)
        if isinstance(value, nn.Module):
            module.add_module(last, value)
        else:
            module.register_buffer(last, value)


def rename_old_keys(state_dict: dict[str, Any], prefix: str) -> None:
    """Give the entries of a state dict of version 0.1 (``_private.super.layer1/0/bn1.weight``) their present names."""
    for key in [key for key in state_dict if key.startswith(prefix + "_")]:
        name = key.removeprefix(prefix)
        new = name.removeprefix("_private.").replace("/", ".")
        if new != name:
            state_dict[prefix + new] = state_dict.pop(key)
