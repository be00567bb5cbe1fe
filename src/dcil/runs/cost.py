"""Count the parameters, multiply-adds and bytes of a pruned network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.overrides import TorchFunctionMode

#: How a table names the multiply-adds between activations.
ATTENTION = "attention: Q K^T, A V"


@dataclass(frozen=True)
class LayerCost:
    """The counts of one Conv or Linear layer; multiply-adds are for one input."""

    name: str
    weights: int
    kept: int
    macs: int
    macs_kept: int

    @property
    def sparsity(self) -> float:
        return 1 - self.kept / self.weights


@dataclass(frozen=True)
class Cost:
    """The counts of a whole network. ``parameters`` counts everything trainable, norm layers and biases included.

    ``attention`` are the multiply-adds of its two products of activations, of which no pruned weight saves any.
    """

    parameters: int
    parameters_kept: int
    layers: tuple[LayerCost, ...]
    attention: int = 0

    @property
    def macs(self) -> int:
        return sum(layer.macs for layer in self.layers) + self.attention

    @property
    def macs_kept(self) -> int:
        return sum(layer.macs_kept for layer in self.layers) + self.attention


@torch.no_grad()
def measure_cost(model: nn.Module, example: Tensor) -> Cost:
    """Count what a finalized model keeps and computes, by running ``example`` (one input, batch 1) through it.

    A weight that is zero counts as pruned. Multiply-adds are those of Conv and Linear layers and of attention, which
    counts all pairs of positions, those hidden by a mask too; norm layers, pooling, softmax and additions, a percent or
    so of the work, are not counted, nor are embeddings, which look up. A layer used twice counts twice, a parameter
    that two layers share (a tied head) once.
    """
    positions: dict[str, int] = {}
    training, attention = model.training, AttentionCount()
    with _counting(model, positions), attention:
        model.eval()(example)
    model.train(training)
    modules = dict(model.named_modules())
    layers = tuple(_cost(name, modules[name], uses) for name, uses in positions.items())
    total = sum(p.numel() for p in model.parameters())
    zeros = {id(m.weight): m.weight.numel() - int(m.weight.count_nonzero()) for m in map(modules.get, positions) if m}
    return Cost(total, total - sum(zeros.values()), layers, attention.macs)


class AttentionCount(TorchFunctionMode):
    """Counts the multiply-adds of scaled dot-product attention while entered."""

    def __init__(self) -> None:
        super().__init__()
        self.macs = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            query, _, value = args[:3]
            self.macs += query.numel() // query.shape[-1] * value.shape[-2] * (query.shape[-1] + value.shape[-1])
        return function(*args, **(kwargs or {}))


def _cost(name: str, module: Any, positions: int) -> LayerCost:
    weights, kept = module.weight.numel(), int(module.weight.count_nonzero())
    return LayerCost(name, weights, kept, weights * positions, kept * positions)


@contextmanager
def _counting(model: nn.Module, positions: dict[str, int]) -> Iterator[None]:
    """Count, while open, how often each layer uses each of its weights."""

    def count(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            if isinstance(module, _ConvTransposeNd):  # each weight meets every input position
                uses = args[0].numel() // module.in_channels
            elif isinstance(module, _ConvNd):  # each weight serves every output position
                uses = output.numel() // module.out_channels
            else:
                uses = output.numel() // output.shape[-1]
            positions[name] = positions.get(name, 0) + uses

        return hook

    wanted: Mapping[str, nn.Module] = {
        name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, _ConvNd))
    }
    handles = [module.register_forward_hook(count(name)) for name, module in wanted.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def summarise_cost(model: nn.Module, example: Tensor) -> dict[str, int]:
    """Return the counts of a finalized model for its summary: in all, and what is kept.

    ``bytes_kept`` is what a sparse file takes at least, see ``entropy_bound``.
    """
    cost, state = measure_cost(model, example), model.state_dict()
    return {
        "parameters": cost.parameters,
        "parameters_kept": cost.parameters_kept,
        "macs": cost.macs,
        "macs_kept": cost.macs_kept,
        "bytes": sum(value.nbytes for value in state.values()),
        "bytes_kept": entropy_bound(state),
    }


def entropy_bound(state: Mapping[str, Tensor]) -> int:
    """Bytes that ``state`` needs at least: per tensor the kept values and n H(p) bits of mask, or all values.

    Each tensor with its own p, which is never more than one p for all would give. A mask with more order than its
    density says (whole filters) can be coded in less.
    """
    total = 0.0
    for tensor in state.values():
        kept, size = int(tensor.count_nonzero()), 8 * tensor.element_size()
        total += min(entropy_bits(tensor.numel(), kept) + kept * size, tensor.numel() * size)
    return math.ceil(total / 8)


def entropy_bits(n: int, kept: int) -> float:
    """Return n H(kept / n): no code that knows only the fraction is shorter on average."""
    return -sum(part * math.log2(part / n) for part in (kept, n - kept) if part)
