"""Count the parameters and multiply-adds of a pruned network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd


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
    """The counts of a whole network. ``parameters`` counts everything trainable, norm layers and biases included."""

    parameters: int
    parameters_kept: int
    layers: tuple[LayerCost, ...]

    @property
    def macs(self) -> int:
        return sum(layer.macs for layer in self.layers)

    @property
    def macs_kept(self) -> int:
        return sum(layer.macs_kept for layer in self.layers)


@torch.no_grad()
def measure_cost(model: nn.Module, example: Tensor) -> Cost:
    """Count what a finalized model keeps and computes, by running ``example`` (one input, batch 1) through it.

    A weight that is zero counts as pruned. Multiply-adds are those of Conv and Linear layers; norm layers, pooling
    and additions, a percent or so of the work, are not counted. A layer used twice counts twice.
    """
    positions: dict[str, int] = {}
    training = model.training
    with _counting(model, positions):
        model.eval()(example)
    model.train(training)
    modules = dict(model.named_modules())
    layers = tuple(_cost(name, modules[name], uses) for name, uses in positions.items())
    total = sum(p.numel() for p in model.parameters())
    zeros = {id(m.weight): m.weight.numel() - int(m.weight.count_nonzero()) for m in map(modules.get, positions) if m}
    return Cost(total, total - sum(zeros.values()), layers)


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
