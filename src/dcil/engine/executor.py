"""Executors: how a step computes the outputs of the paths and the gradient of the loss.

The one here runs the network as it is; ``engine.cuda`` has those that put the paths on streams or fuse the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from dcil import SparseNet

Outputs = dict[str, Tensor]
Loss = Callable[[Outputs, Tensor], Tensor]
#: Called with the detached outputs and loss of a step.
OnLoss = Callable[[Outputs, Tensor], None]


class Executor(Protocol):
    def begin(self) -> None:
        """Called before the first path of a step, when the weights are final."""

    def outputs(self, x: Tensor, paths: Iterable[str], track: bool = True) -> Outputs:
        """Return the outputs of the paths; without ``track`` the running statistics do not change."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss`` to those before it in this step."""

    def finish(self) -> None:
        """Called after the last ``backward``; afterwards the gradient is where the optimizer reads it."""


def _ignore(outputs: Outputs, loss: Tensor) -> None: ...


def all_at_once(
    executor: Executor, paths: Iterable[str], loss: Loss, x: Tensor, y: Tensor, on_loss: OnLoss = _ignore
) -> tuple[Outputs, Tensor]:
    """Compute outputs, loss and gradient of a step; ``on_loss`` is called before the backward pass."""
    outputs = executor.outputs(x, paths)
    value = loss(outputs, y)
    result = {path: output.detach() for path, output in outputs.items()}, value.detach()
    on_loss(*result)
    executor.backward(value)
    return result


def one_at_a_time(
    executor: Executor, paths: Iterable[str], loss: Loss, x: Tensor, y: Tensor, on_loss: OnLoss = _ignore
) -> tuple[Outputs, Tensor]:
    """Compute the same with one path's activations in memory: d f(p, s) = d f(p, const) + d f(const, s).

    This costs one more forward pass of each path but the first, whose outputs the loss of the first one needs.
    """
    names = list(paths)
    with torch.no_grad():
        known = {name: executor.outputs(x, [name], track=False)[name] for name in names[1:]}
    value = torch.zeros(())
    for name in names:
        known |= executor.outputs(x, [name])
        value = loss({path: known[path] for path in names if path in known}, y)
        executor.backward(value)
        known = {path: output.detach() for path, output in known.items()}
    on_loss(known, value.detach())
    return known, value.detach()


class EagerExecutor:
    """Runs the network as it is, one operation after the other."""

    def __init__(self, net: SparseNet) -> None:
        self.net = net

    def begin(self) -> None: ...

    def outputs(self, x: Tensor, paths: Iterable[str], track: bool = True) -> Outputs:
        if track:
            return {path: self.net.path(path, x) for path in paths}
        return {path: self.untracked(path, x) for path in paths}

    def untracked(self, path: str, x: Tensor) -> Tensor:
        """Return the path's output computed with copies of its buffers and attributes."""
        tensors = self.net.tensors(path)
        buffers = {name: tensors.get(name, buffer).clone() for name, buffer in self.net.model.named_buffers()}
        with self.net._checks.attributes.trial(path, self.net.model):
            out: Tensor = self.net.call(tensors | buffers, x)
        return out

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def finish(self) -> None: ...
