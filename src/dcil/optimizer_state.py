"""What an optimizer remembers about a weight."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer


def slots(optimizer: Optimizer | None, weight: nn.Parameter) -> list[Tensor]:
    """The optimizer's tensors for each single weight: momentum, second moments."""
    if optimizer is None or weight not in optimizer.state:
        return []
    values = optimizer.state[weight].values()
    return [value for value in values if isinstance(value, Tensor) and value.shape == weight.shape]


def forget(optimizer: Optimizer | None, weight: nn.Parameter, where: Tensor) -> None:
    """Clear what is remembered about the weights at ``where``."""
    for slot in slots(optimizer, weight):
        slot.masked_fill_(where, 0)


def reset(optimizer: Optimizer | None, model: nn.Module) -> None:
    """An empty memory for every parameter of ``model``, as at the start of a training."""
    for parameter in model.parameters():
        for slot in slots(optimizer, parameter):
            slot.zero_()


def momentum(optimizer: Optimizer | None, weight: nn.Parameter) -> Tensor:
    """The direction the weight has been moving in: SGD's buffer, Adam's m / (sqrt(v) + 1e-8), else the gradient."""
    state = optimizer.state.get(weight, {}) if optimizer is not None else {}
    if isinstance(buffer := state.get("momentum_buffer"), Tensor):
        return buffer
    if "exp_avg" in state:
        direction: Tensor = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)
        return direction
    assert weight.grad is not None, "a method that follows the momentum needs a gradient"
    return weight.grad
