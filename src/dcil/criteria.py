"""Criteria: one score per weight (larger = keep).

A criterion may accumulate statistics of the gradients; they live in the network's state, under its own keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dcil.errors import UserError
from dcil.sharding import like
from dcil.validation import Validated
from dcil.weight import PrunableWeight, wide

State = dict[str, Tensor]


@dataclass(frozen=True)
class Criterion(Validated):
    """Scores weights; the hooks besides ``score`` are for criteria that accumulate statistics."""

    #: True where ``score`` is made of tensor operations on the device alone, so that an engine may record it.
    recordable: ClassVar[bool] = False
    #: True where it is elementwise, so that it is right on sharded weights.
    shards: ClassVar[bool] = False
    #: p of the power mean (mean of score^p)^(1/p) that is the score of a group of weights.
    power: ClassVar[int] = 1

    def init_state(self, layers: Sequence[PrunableWeight]) -> State:
        """Create the tensors that ``observe`` accumulates into."""
        return {}

    def observe(self, layers: Sequence[PrunableWeight], state: State) -> None:
        """Accumulate the gradients of a step, in place."""

    def reads(self, layer: PrunableWeight, state: State) -> list[Tensor]:
        """The tensors besides the weight that ``score`` is computed from: finite, and not zero in every layer."""
        return []

    def score(self, layer: PrunableWeight, state: State) -> Tensor:
        """A non-negative tensor of the weight's shape; products are in float64, where they do not underflow."""
        raise NotImplementedError("abstract: a criterion defines score")

    def compensate(self, layer: PrunableWeight, dropped: Tensor, state: State) -> None:
        """Adjust the kept weights for those at ``dropped``, which are about to become zero."""


def gradient_of(layer: PrunableWeight) -> Tensor:
    """The gradient of the last backward pass."""
    if layer.weight.grad is None:
        raise UserError(
            f"{layer.name} must have a gradient for this criterion, got None: call net.step after backward() "
            "and before zero_grad()"
        )
    return like(layer.weight.grad, layer.weight)


@dataclass(frozen=True)
class Magnitude(Criterion):
    """|w|, the L2 criterion of DPF and DCIL. Its root mean square over a filter is that filter's score."""

    recordable: ClassVar[bool] = True
    shards: ClassVar[bool] = True
    power: ClassVar[int] = 2

    def score(self, layer: PrunableWeight, state: State) -> Tensor:
        return layer.magnitude


@dataclass(frozen=True)
class LAMP(Criterion):
    """w_u^2 / (sum of w_v^2 over the layer's weights that are not smaller), of weights in descending order (Lee, Park,
    Mo, Ahn & Shin, "Layer-adaptive sparsity for the magnitude-based pruning", ICLR 2021).

    A global ranking by it gives every layer a share of its own; each keeps its largest weight longest, with score 1.
    Of equal weights the first is the larger. The original (github.com/jaeho-lee/layer-adaptive-sparsity) computes in
    float32; its scores and masks are those on the same tensors but for its rounding.
    """

    recordable: ClassVar[bool] = True

    def score(self, layer: PrunableWeight, state: State) -> Tensor:
        size = layer.magnitude.double().flatten()
        squares, order = (
            (size / size.amax().clamp_min(torch.finfo(torch.double).tiny)).square().sort(descending=True, stable=True)
        )
        scores = squares / squares.cumsum(0).clamp_min(torch.finfo(torch.double).tiny)
        return torch.empty_like(scores).scatter_(0, order, scores).view_as(layer.weight)


@dataclass(frozen=True)
class Gradient(Criterion):
    """|g|: what the loss gains at first order when the weight is moved (the DCIL authors' option ``grad``)."""

    recordable: ClassVar[bool] = True
    shards: ClassVar[bool] = True

    def reads(self, layer: PrunableWeight, state: State) -> list[Tensor]:
        return [gradient_of(layer)]

    def score(self, layer: PrunableWeight, state: State) -> Tensor:
        return wide(gradient_of(layer)).abs()


@dataclass(frozen=True)
class Taylor(Criterion):
    """|w * g|: what the loss changes at first order when the weight is pruned (the DCIL authors' option ``syn``)."""

    recordable: ClassVar[bool] = True
    shards: ClassVar[bool] = True

    def reads(self, layer: PrunableWeight, state: State) -> list[Tensor]:
        return [gradient_of(layer)]

    def score(self, layer: PrunableWeight, state: State) -> Tensor:
        return (layer.weight.detach().double() * gradient_of(layer).double()).abs()


@dataclass(frozen=True)
class OBD(Criterion):
    """0.5 * H_kk * w_k^2: optimal brain damage (LeCun, Denker & Solla 1990).

    H_kk is the diagonal of the empirical Fisher matrix, the mean squared gradient of the batches seen: an
    exponential mean with weight ``decay`` on the past, so that it follows the training.
    """

    decay: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("decay", 0 <= self.decay < 1, ">= 0 and < 1", "1 would never see a gradient")

    recordable: ClassVar[bool] = True
    shards: ClassVar[bool] = True

    def init_state(self, layers: Sequence[PrunableWeight]) -> State:
        return {f"fisher.{layer.name}": torch.zeros_like(wide(layer.weight.detach())) for layer in layers}

    def observe(self, layers: Sequence[PrunableWeight], state: State) -> None:
        for layer in layers:
            fisher, grad = state[f"fisher.{layer.name}"], wide(gradient_of(layer))
            fisher.mul_(self.decay).addcmul_(grad, grad, value=1 - self.decay)

    def reads(self, layer: PrunableWeight, state: State) -> list[Tensor]:
        return [state[f"fisher.{layer.name}"]]

    def score(self, layer: PrunableWeight, state: State) -> Tensor:
        return 0.5 * state[f"fisher.{layer.name}"].double() * layer.weight.detach().double().square()


@dataclass(frozen=True)
class OBS(Criterion):
    """w_q^2 / (2 [H^-1]_qq), and the rest of the block moves by -(w_q / [H^-1]_qq) H^-1 e_q (Hassibi & Stork 1993).

    H is the empirical Fisher matrix of the gradients seen, in blocks of ``block`` neighbouring weights, so that it
    takes ``block`` numbers per weight. Its inverse is built gradient by gradient from I / ``damp`` (Woodbury):

        H^-1 <- H^-1 - (H^-1 g)(H^-1 g)^T / (samples + g^T H^-1 g)

    and starts again after ``samples`` gradients, so that it follows the training. The practical version of
    Kurtic et al. 2022 is this with a few large batches of gradients at every update.
    """

    block: int = 16
    damp: float = 1e-4
    samples: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("block", 1 <= self.block <= 1024, "from 1 to 1024", "numbers held per weight")
        self.require("damp", 1e-10 <= self.damp <= 1e10, "from 1e-10 to 1e10", "its inverse is held in float32")
        self.require("samples", 1 <= self.samples <= 2**24, "from 1 to 2**24", "counted in float32")

    def init_state(self, layers: Sequence[PrunableWeight]) -> State:
        state: State = {}
        for layer in layers:
            blocks = -(-layer.weight.numel() // self.block)
            state[f"inverse.{layer.name}"] = self.fresh(layer.weight, blocks)
            state[f"seen.{layer.name}"] = torch.zeros((), device=layer.weight.device)
        return state

    def fresh(self, like: Tensor, blocks: int) -> Tensor:
        return torch.eye(self.block, device=like.device).repeat(blocks, 1, 1) / self.damp

    def observe(self, layers: Sequence[PrunableWeight], state: State) -> None:
        for layer in layers:
            inverse, seen = state[f"inverse.{layer.name}"], state[f"seen.{layer.name}"]
            full = seen >= self.samples  # on the device: nothing waits here
            inverse.copy_(torch.where(full, self.fresh(inverse, len(inverse)), inverse))
            seen.copy_(torch.where(full, 0.0, seen) + 1)
            known = wide(inverse)  # the net may have been moved to another dtype
            g = self.blocks(gradient_of(layer)).to(known).unsqueeze(2)
            direction = known @ g
            inverse.sub_(direction @ direction.mT / (self.samples + (g.mT @ direction)))

    def blocks(self, values: Tensor) -> Tensor:
        """Reshape a layer's values to rows of ``block``, the last one padded with zeros."""
        flat = values.detach().float().flatten()
        return F.pad(flat, (0, -len(flat) % self.block)).view(-1, self.block)

    def reads(self, layer: PrunableWeight, state: State) -> list[Tensor]:
        return [state[f"inverse.{layer.name}"], gradient_of(layer)]  # without gradients the first is a constant

    def score(self, layer: PrunableWeight, state: State) -> Tensor:
        diagonal = state[f"inverse.{layer.name}"].diagonal(dim1=1, dim2=2).double()
        scores = self.blocks(layer.weight).double().square() / (2 * diagonal)
        return scores.flatten()[: layer.weight.numel()].view_as(layer.weight)

    def compensate(self, layer: PrunableWeight, dropped: Tensor, state: State) -> None:
        """Several weights of a block at once: -H^-1[:, Q] (H^-1[Q, Q])^-1 w_Q, one weight being Hassibi's formula."""
        inverse = wide(state[f"inverse.{layer.name}"])
        w = self.blocks(layer.weight).to(inverse)
        q = self.blocks(dropped) > 0
        # Rows and columns outside Q become those of the identity, so that every block solves for its own Q.
        inside = q.unsqueeze(1) & q.unsqueeze(2)
        system = torch.where(inside, inverse, torch.eye(self.block, dtype=inverse.dtype, device=inverse.device))
        solved, _ = torch.linalg.solve_ex(system, torch.where(q, w, 0.0).unsqueeze(2))  # which waits for no device
        moved = w - (inverse @ solved).squeeze(2)
        solvable = moved.isfinite().all(1, keepdim=True)  # a singular block, as after huge gradients, stays as it is
        kept = torch.where(q | ~solvable, w, moved)  # the caller sets the dropped ones to zero
        layer.weight.copy_(kept.flatten()[: layer.weight.numel()].view_as(layer.weight))
