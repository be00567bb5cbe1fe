"""Naming: modules and buffers kept under the names that a user's model has for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn


class Nested(nn.Module):
    """Holds modules and buffers under dotted names, ``layer1.0.bn1``, nested as they are in the user's model.

    It has no methods of its own: a user's layer may be called like one.
    """


def put(nested: Nested, name: str, value: nn.Module | Tensor) -> None:
    """Add a module, or a tensor as a buffer, under a dotted name."""
    module: nn.Module = nested
    *parents, last = name.split(".")
    for part in parents:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    if isinstance(value, nn.Module):
        module.add_module(last, value)
    else:
        module.register_buffer(last, value)


def first_names(model: nn.Module) -> dict[str, str]:
    """Further name of a parameter or buffer -> its first name: weights are tied, modules registered twice."""
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, tensor in every:
        first.setdefault(id(tensor), name)
    return {name: first[id(tensor)] for name, tensor in every if first[id(tensor)] != name}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Of ``first_names`` those that are places of their own: a module registered twice has its tensors once."""
    places = {
        f"{prefix}.{key}".lstrip(".")
        for prefix, module in model.named_modules()
        for key in (*module._parameters, *module._buffers)
    }
    return {name: first for name, first in first_names(model).items() if name in places}


def rename_old_keys(state_dict: dict[str, Any], prefix: str) -> None:
    """Give the entries of a state dict of version 0.1 (``_private.super.layer1/0/bn1.weight``) their present names."""
    extra = state_dict.get(prefix + "_extra_state")
    if isinstance(extra, Tensor) and extra.dim():  # of a later version, whose names may have slashes of their own
        return
    for key in [key for key in state_dict if key.startswith(prefix + "_")]:
        name = key.removeprefix(prefix)
        new = name.removeprefix("_private.").replace("/", ".")
        if new != name:
            state_dict[prefix + new] = state_dict.pop(key)
    masks = [tensor for key, tensor in state_dict.items() if key.startswith(f"{prefix}_masks.")]
    if masks and f"{prefix}_kept" not in state_dict:
        state_dict[f"{prefix}_kept"] = sum(mask.sum().cpu() for mask in masks)


# -- names of parameters, as those who group them ask for ------------------------------------------------------------

#: What timm asks a network for. The last three are facts about it, the first two are of its parameters' names.
ASKED = ("no_weight_decay", "group_matcher", "pretrained_cfg", "default_cfg", "num_classes")


def answer(asked: str, found: Any, paths: Sequence[str]) -> Any:
    """The model's answer to ``asked``, for a network whose parameters' names begin with one of ``paths``."""
    if asked == "no_weight_decay":
        return lambda: prefix_names(found(), paths)
    if asked == "group_matcher":
        return lambda coarse=False: prefix_matcher(found(coarse=coarse), paths)
    return found


def prefix_names(names: Iterable[str], paths: Iterable[str]) -> set[str]:
    """The names on every path."""
    return {f"{path}.{name}" for path in paths for name in names}


def prefix_matcher(matcher: Mapping[str, Any] | Callable[[str], Any], paths: Iterable[str]) -> Any:
    """timm's rule for which parameters form a layer (regular expressions, or a function of the name) on every path."""
    if callable(matcher):
        return lambda name: matcher(name.partition(".")[2])
    start = "|".join(map(re.escape, paths))

    def prefixed(pattern: str) -> str:
        # Matched from the beginning of a name anyway, so that "^" goes, but not as the first in brackets.
        bare = re.sub(r"(?<![\[\\])\^", "", pattern)
        return rf"(?:{start})\.(?:{bare})"

    return {
        group: prefixed(spec) if isinstance(spec, str) else spec and [(prefixed(one), more) for one, more in spec]
        for group, spec in matcher.items()
    }
