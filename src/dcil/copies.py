"""Copies of a network and state dicts for it, also where ``fully_shard`` or tensor parallel hold it in parts."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from dcil.fsdp import COMPOSABLE, is_block
from dcil.sharding import is_sharded, like, whole

Copied = TypeVar("Copied", nn.Module, dict[str, nn.Module])


def placed(state_dict: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    """A state dict of whole tensors as ``model`` can load it: each process's parts where it is sharded."""
    own = model.state_dict()
    if not any(map(is_sharded, own.values())):
        return state_dict
    return {name: like(value, own[name]) if is_sharded(own.get(name)) else value for name, value in state_dict.items()}


def copied(modules: Copied, gather: bool = False) -> Copied:
    """A deep copy of a module, or of a dict of them, without what torch.distributed attached to it.

    A sharded parameter stays so, or with ``gather`` becomes a plain one (every process must call it).
    """
    found = list(modules.values()) if isinstance(modules, dict) else [modules]
    inner = [module for outer in found for module in outer.modules()]
    memo: dict[int, Any] = {}
    kinds = {module: type(module) for module in inner if is_block(module)}
    for module in inner:
        tensors = itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))
        memo.update({id(tensor): own_copy(tensor, gather) for tensor in tensors if is_sharded(tensor)})
        for key, value in vars(module).items():
            memo.update({id(t): t.detach().clone() for t in computed_in(value) if id(t) not in memo})
            if isinstance(value, dict) and ("hooks" in key or COMPOSABLE in key):
                kept = {k: hook for k, hook in value.items() if not of_torch_distributed(hook)}
                if len(kept) < len(value):
                    memo[id(value)] = type(value)(kept)
    try:
        for module, kind in kinds.items():
            module.__class__ = kind.__mro__[2]  # the class that fully_shard derived its own from
        result = copy.deepcopy(modules, memo)
    finally:
        for module, kind in kinds.items():
            module.__class__ = kind
    for module in inner:
        for key in [key for key in vars(memo[id(module)]) if COMPOSABLE in key]:
            delattr(memo[id(module)], key)
    return result


def computed_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors that a forward pass left in an attribute, which torch does not copy with their history."""
    if isinstance(value, Tensor):
        yield from () if value.is_leaf else (value,)
    elif type(value) in (list, tuple, dict):
        for item in value.values() if isinstance(value, dict) else value:  # type: ignore[attr-defined]
            yield from computed_in(item)


def own_copy(tensor: Tensor, gather: bool) -> Tensor:
    found = whole(tensor) if gather else tensor.detach().clone()
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def of_torch_distributed(hook: object) -> bool:
    """Whether a hook, or an entry of a module's state, was put there by ``fully_shard`` or ``parallelize_module``."""
    hook = getattr(hook, "hook", hook)  # as state dicts wrap theirs
    hook = getattr(hook, "func", hook)
    where = getattr(hook, "__module__", None) or type(hook).__module__
    return str(where).startswith("torch.distributed")
