"""DCIL by hand: two plain networks that share nothing, and the gradients that SparseNet must have got from them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcil import SparseNet

Loss = Callable[[nn.Module], tuple[Tensor, Tensor]]


def pair(net: SparseNet) -> tuple[nn.Module, nn.Module]:
    """The pruned and the super network as two independent copies of the user's model."""
    state, masks = net.state_dict(), net.masks
    own = {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}
    private = {key.removeprefix("super."): value for key, value in state.items() if key.startswith("super.")}
    pruned, super_net = (copy.deepcopy(net.model) for _ in range(2))
    pruned.load_state_dict({key: value * masks[key] if key in masks else value for key, value in own.items()})
    super_net.load_state_dict(own | private)
    return pruned.train(), super_net.train()


def gradients(net: SparseNet, loss: Callable[[nn.Module, nn.Module], Tensor]) -> dict[str, Tensor]:
    """What the gradients of ``net`` must be, by its parameters' names, where ``loss`` is of the two networks."""
    pruned, super_net = pair(net)
    loss(pruned, super_net).backward()
    found: dict[str, Tensor] = {}
    masks = net.masks
    of_super = dict(super_net.named_parameters())
    for name, parameter in pruned.named_parameters():
        p, s = (torch.zeros_like(w) if w.grad is None else w.grad for w in (parameter, of_super[name]))
        found[f"model.{name}"] = torch.where(masks[name], p, s) if name in masks else p
        found[f"super.{name}"] = s
    return found


def assert_gradients(net: SparseNet, expected: Mapping[str, Tensor], tolerance: float = 1e-5) -> None:
    """Compare every gradient that ``net`` has, relative to its largest entry."""
    for name, parameter in net.named_parameters():
        got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        scale = max(1e-3, float(expected[name].abs().max()))
        error = float((got - expected[name]).abs().max()) / scale
        assert error < tolerance, f"gradient of {name} is off by {error:.2e}"


def kl(student: Tensor, teacher: Tensor, temperature: float = 2.0) -> Tensor:
    """T^2 * KL(teacher || student; T), the mean over what is not a class; classes last."""
    p = F.softmax(teacher.detach() / temperature, -1)
    q = F.softmax(student / temperature, -1)
    return temperature**2 * (p * (p / q).log()).sum(-1).mean()


def dcil_loss(
    net: SparseNet, pruned: Any, super_out: Any, target: Any, task: Callable[[Any, Any], Tensor] = F.cross_entropy
) -> Tensor:
    """Eq. 4 of the paper summed over both networks, from their outputs."""
    weight = net.method.kl_at(net.steps_done)  # type: ignore[attr-defined]
    loss = task(pruned, target) + task(super_out, target)
    return loss + weight * (kl(pruned, super_out) + kl(super_out, pruned)) if weight else loss
