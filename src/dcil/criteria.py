"""Criteria: how much each weight is worth, as one score per weight (larger = keep).

A criterion may watch the gradients of every step; what it remembers lives in the network's state, under its own keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dcil.errors import UserError
from dcil.layer import Layer

State = dict[str, Tensor]


@dataclass(frozen=True)
class Criterion:
    """``score`` gives a non-negative tensor of the weight's shape; the other hooks are for those that remember."""

    #: True where ``score`` is made of tensor operations on the device alone, so that an engine may record it.
    recordable: ClassVar[bool] = False

    def start(self, layers: Sequence[Layer]) -> State:
        """The tensors it remembers with."""
        return {}

    def observe(self, layers: Sequence[Layer], state: State) -> None:
        """Take note of the gradients of a step."""

    def score(self, layer: Layer, state: State) -> Tensor:
        raise NotImplementedError("abstract: a criterion defines score")

    def compensate(self, layer: Layer, dropped: Tensor, state: State) -> None:
        """Move the weights that stay, to make up for those at ``dropped`` that are about to become zero."""


def gradient_of(layer: Layer) -> Tensor:
    if layer.weight.grad is None:
        raise UserError(f"the criterion needs the gradient of {layer.name}: call net.step after backward()")
    return layer.weight.grad


@dataclass(frozen=True)
class Magnitude(Criterion):
    """w^2, the L2 criterion of DPF and DCIL. Its mean over a filter is that filter's score."""

    recordable: ClassVar[bool] = True

    def score(self, layer: Layer, state: State) -> Tensor:
        weight = layer.weight.detach()
        return (weight if weight.dtype == torch.double else weight.float()).square()


@dataclass(frozen=True)
class Gradient(Criterion):
    """|g|: what the loss gains at first order by moving the weight (the DCIL authors' option ``grad``)."""

    recordable: ClassVar[bool] = True

    def score(self, layer: Layer, state: State) -> Tensor:
        return gradient_of(layer).float().abs()


@dataclass(frozen=True)
class Taylor(Criterion):
    """|w * g|: what the loss changes at first order if the weight goes (the DCIL authors' option ``syn``)."""

    recordable: ClassVar[bool] = True

    def score(self, layer: Layer, state: State) -> Tensor:
        return (layer.weight.detach() * gradient_of(layer)).float().abs()


@dataclass(frozen=True)
class OBD(Criterion):
    """0.5 * H_kk * w_k^2: optimal brain damage (LeCun, Denker & Solla 1990).

    H_kk is the diagonal of the empirical Fisher matrix, the mean squared gradient of the batches seen: an
    exponential mean with weight ``decay`` on the past, so that it follows the training.
    """

    decay: float = 0.99

    recordable: ClassVar[bool] = True

    def start(self, layers: Sequence[Layer]) -> State:
        return {f"fisher.{layer.name}": torch.zeros_like(layer.weight) for layer in layers}

    def observe(self, layers: Sequence[Layer], state: State) -> None:
        for layer in layers:
            fisher, grad = state[f"fisher.{layer.name}"], gradient_of(layer)
            fisher.mul_(self.decay).addcmul_(grad, grad, value=1 - self.decay)

    def score(self, layer: Layer, state: State) -> Tensor:
        return 0.5 * state[f"fisher.{layer.name}"].float() * layer.weight.detach().float().square()
