"""The model itself as the pruned network: for good, or while something outside of the net calls or saves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dcil.net import SparseNet


def is_final(net: SparseNet) -> bool:
    """Whether the scheduled sparsity has reached the final one."""
    return net.method.sparsity_at(net.steps_done) >= net.method.sparsity


@torch.no_grad()
def write_zeros(net: SparseNet) -> None:
    """Make the model itself the pruned network."""
    for layer in net.layers:
        layer.weight.masked_fill_(~layer.mask, 0)


@contextmanager
def zeros_in_place(net: SparseNet) -> Iterator[None]:
    """Make the model itself the pruned network, and give it all its weights back in the end."""
    weights = [layer.weight.detach().clone() for layer in net.layers]
    write_zeros(net)
    try:
        yield
    finally:
        for layer, weight in zip(net.layers, weights, strict=True):
            layer.weight.detach().copy_(weight)
