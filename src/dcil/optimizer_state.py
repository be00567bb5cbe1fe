"""Optimizer state: the tensors that an optimizer keeps for a weight (momentum, second moments)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer


def state_tensors(optimizer: Optimizer | None, weight: nn.Parameter) -> list[Tensor]:
    """The optimizer's tensors of the weight's own shape."""
    if optimizer is None or weight not in optimizer.state:
        return []
    values = optimizer.state[weight].values()
    return [value for value in values if isinstance(value, Tensor) and value.shape == weight.shape]


def reset_state(optimizer: Optimizer | None, model: nn.Module) -> None:
    """Zero the state of every parameter of ``model``, as at the start of a training."""
    for parameter in model.parameters():
        for tensor in state_tensors(optimizer, parameter):
            tensor.zero_()


def momentum(optimizer: Optimizer | None, weight: nn.Parameter) -> Tensor:
    """The direction of the weight's updates: SGD's buffer, Adam's m / (sqrt(v) + 1e-8), else the gradient."""
    state = optimizer.state.get(weight, {}) if optimizer is not None else {}
    if isinstance(buffer := state.get("momentum_buffer"), Tensor):
        return buffer
    if "exp_avg" in state:
        direction: Tensor = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)
        return direction
    assert weight.grad is not None, "a method that follows the momentum needs a gradient"
    return weight.grad
