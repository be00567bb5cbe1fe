"""Executors: how a step computes the outputs of the paths and the gradient of the loss.

The one here runs the network as it is; ``engine.cuda`` has those that put the paths on streams, compile or fuse them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dcil import SparseNet, fsdp
from dcil.batch_share import first_samples

#: Path -> what the network returns.
Outputs = dict[str, Any]
Loss = Callable[[Outputs, Any], Tensor]
#: Parameter -> its gradient; one flat tensor may hold all of them.
Gradients = dict[Tensor, Tensor]
#: Called with the detached outputs and loss of a step.
OnLoss = Callable[[Outputs, Tensor], None]


@dataclass(frozen=True)
class Inputs:
    """What the network is called with."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def only(self) -> Tensor | None:
        """The tensor that is all of the inputs, if it is one."""
        found = self.args[0] if len(self.args) == 1 and not self.kwargs else None
        return found if isinstance(found, Tensor) else None

    def first(self, share: float) -> Inputs:
        """The same for a share of the batch."""
        return Inputs(*first_samples(self.args, self.kwargs, share))


class Executor(Protocol):
    def begin(self) -> None:
        """Called before the first path of a step, when the weights are final."""

    def outputs(self, inputs: Inputs, paths: Iterable[str], track: bool = True) -> Outputs:
        """Return the outputs of the paths, each of its share of the batch; without ``track`` the running statistics
        do not change."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss`` to those before it in this step."""

    def finish(self) -> Gradients:
        """Called after the last ``backward``; return the gradients, which are where the optimizer reads them."""


def ignore(outputs: Outputs, loss: Tensor) -> None: ...


def all_at_once(
    executor: Executor, paths: Iterable[str], loss: Loss, inputs: Inputs, target: Any, on_loss: OnLoss = ignore
) -> tuple[Outputs, Tensor]:
    """Compute outputs, loss and gradient of a step; ``on_loss`` is called before the backward pass."""
    outputs = executor.outputs(inputs, paths)
    value = loss(outputs, target)
    result = {path: detached(output) for path, output in outputs.items()}, value.detach()
    on_loss(*result)
    executor.backward(value)
    return result


def one_at_a_time(
    executor: Executor, paths: Iterable[str], loss: Loss, inputs: Inputs, target: Any, on_loss: OnLoss = ignore
) -> tuple[Outputs, Tensor]:
    """Compute the same with one path's activations in memory: d f(p, s) = d f(p, const) + d f(const, s).

    This costs one more forward pass of each path but the first, whose outputs the loss of the first one needs.
    """
    names = list(paths)
    with torch.no_grad():
        known = {name: executor.outputs(inputs, [name], track=False)[name] for name in names[1:]}
    value = torch.zeros(())
    for name in names:
        known |= executor.outputs(inputs, [name])
        value = loss({path: known[path] for path in names if path in known}, target)
        executor.backward(value)
        known = {path: detached(output) for path, output in known.items()}
    on_loss(known, value.detach())
    return known, value.detach()


def detached(output: Any) -> Any:
    """The output without its history, as far as it is made of what torch knows, or of dataclasses."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach()
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: detached(getattr(value, f.name)) for f in fields(value) if f.init})
        return value

    return tree_map(leaf, output)


class EagerExecutor:
    """Runs the network as it is, one operation after the other."""

    def __init__(self, net: SparseNet) -> None:
        self.net = net

    def begin(self) -> None: ...

    def outputs(self, inputs: Inputs, paths: Iterable[str], track: bool = True) -> Outputs:
        seen = {path: inputs.first(self.net.method.share(path)) for path in paths}
        if track:
            return {path: self.net.path(path, *own.args, **own.kwargs) for path, own in seen.items()}
        return {path: self.untracked(path, own) for path, own in seen.items()}

    def untracked(self, path: str, inputs: Inputs) -> Any:
        """Return the path's output computed with copies of its buffers and attributes."""
        net, blocks = self.net, fsdp.find_blocks(self.net)
        tensors = net.tensors(path, fsdp.names_outside(net.model, blocks), net.views([path]).get(path))
        buffers = {name: tensors.get(name, buffer).clone() for name, buffer in net.model.named_buffers()}
        in_blocks = fsdp.substituted(blocks, lambda names: net.tensors(path, names))
        with net._checks.attributes.trial(path, net.model), in_blocks:
            return net.call(tensors | buffers, *inputs.args, **inputs.kwargs)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def finish(self) -> Gradients:
        return {p: p.grad for p in self.net.parameters() if p.grad is not None}
