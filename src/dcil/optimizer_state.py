"""Optimizer state: the tensors that an optimizer keeps for a weight (momentum, second moments)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from dcil.errors import UserError
from dcil.weight import wide


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
    if isinstance(mean := state.get("exp_avg"), Tensor):
        square = state.get("exp_avg_sq")  # wide, since 1e-8 is zero in float16
        return wide(mean) / (wide(square).sqrt() + 1e-8) if isinstance(square, Tensor) else mean  # Lion has no square
    if weight.grad is None:
        raise UserError(
            "a method that follows the momentum must find one, got no optimizer with one and no gradient: pass "
            "the optimizer to net.step, e.g. SGD(momentum=0.9), or call net.step before zero_grad()"
        )
    return weight.grad
