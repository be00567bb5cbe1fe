"""What stands in the way of recording a training step of one's own: whatever happens on the host would be frozen."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dcil import SparseNet
from dcil.sharding import is_sharded

HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def step_obstacle(net: SparseNet, low_memory: bool = False) -> str | None:
    """Return why forward and backward pass of ``net`` cannot be recorded; None if they can."""
    method = type(net.method).__name__
    if any(map(is_sharded, net.parameters())):
        return "its parameters are sharded"
    if net.method.loss_key(net.steps_done) is None:
        return f"{method} overrides a hook without declaring its loss_key"
    if net._checks.attributes.marks:
        module, name = next(iter(net._checks.attributes.marks))
        return f"forward keeps a state in the attribute {name!r} of a {type(module).__name__}: make it a buffer"
    for name, module in net.model.named_modules():
        if any(getattr(module, hooks, None) for hooks in HOOKS):
            return f"module {name or type(module).__name__!r} has hooks, which a recording would not call"
    for name, parameter in net.named_parameters():
        if any(getattr(parameter, hooks, None) for hooks in GRADIENT_HOOKS):
            return f"parameter {name} has gradient hooks, which a recording would not call"
    return dropout_obstacle(net) if low_memory else None


def dropout_obstacle(net: SparseNet) -> str | None:
    """Return why one path cannot be run twice; None if it can."""
    drops = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p for m in net.modules())
    return "low_memory runs a path twice, and dropout would differ between the two" if drops else None


def optimizer_obstacle(optimizer: Optimizer, counted: str | None, scaler: Any) -> str | None:
    """Return why the optimizer's step cannot be recorded with the gradients; None if it can."""
    kind = type(optimizer).__name__
    if counted is not None:
        return f"{kind} counts on the host ({counted})"
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    if any(not str(getattr(hook, "__module__", "")).startswith("dcil.") for hook in hooks):
        return f"{kind} has hooks, which a recording would not call"
    if scaler is not None and not getattr(optimizer, "_step_supports_amp_scaling", False):
        return f"the GradScaler waits for the device unless {kind} is made with fused=True"
    sgd = isinstance(optimizer, torch.optim.SGD)
    if not sgd and any("capturable" not in group for group in optimizer.param_groups):
        return f"{kind} has no option capturable"
    return None


# -- what the host does unseen ---------------------------------------------------------------------------------------


def host_random_state(net: SparseNet) -> list[Any]:
    """Return the states of the random generators that a recording would not advance."""
    found: list[Any] = [random.getstate()]
    if net.first_mask.is_cuda:
        found.append(torch.get_rng_state().tolist())
    if (numpy := sys.modules.get("numpy")) is not None:
        found.append([str(part) for part in numpy.random.get_state()])
    return found


def host_numbers(optimizer: Optimizer) -> dict[str, Any]:
    """Return the plain numbers that the optimizer keeps, its learning rates aside."""
    return {
        f"{key!r} of {where}": value
        for where, found in kept_by(optimizer)
        for key, value in found.items()
        if isinstance(value, (bool, int, float, str)) and key != "lr"
    }


def kept_by(optimizer: Optimizer) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    yield "the optimizer", {key: value for key, value in vars(optimizer).items() if not key.startswith("_")}
    states = ((f"state {i}", state) for i, state in enumerate(optimizer.state.values()))
    yield from chain(((f"group {i}", group) for i, group in enumerate(optimizer.param_groups)), states)


def changed_number(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Return the name of a number that is another one than before."""
    return next((name for name, value in after.items() if value != before.get(name, value)), None)
