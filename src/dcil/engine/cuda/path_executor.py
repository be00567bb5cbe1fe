"""Execute the network as it is, each path on a stream of its own, compiled where torch can compile it."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from dcil import SparseNet
from dcil.engine.executor import Gradients, Inputs, Outputs
from dcil.engine.streams import Streams

#: Compiled variants of a path: one for each shape of the inputs, each with and without gradients.
MAX_VARIANTS = 64
Tensors = dict[str, Tensor]


class PathExecutor:
    """Runs each path as a function of aliases of its parameters: their gradients arrive separately, and are summed in
    one operation. Paths on streams of their own fill the GPU together where one alone leaves gaps.

    backend   of torch.compile; None runs the network operation by operation
    serial    one path after the other on one stream, to hold the activations of one at a time
    """

    def __init__(self, net: SparseNet, backend: str | None = None, serial: bool = False) -> None:
        self.net, self.backend = net, backend
        paths = list(net.method.paths)
        self.streams = Streams(net.first_mask.device, paths[:1] if serial else paths)
        self.functions = {path: compiled(path_function(net, path), backend) for path in paths}
        self.begin()

    def begin(self) -> None:
        """Alias what each path trains, anew in every step: an alias belongs to the history of one."""
        net = self.net
        self.found: dict[Tensor, list[Tensor]] = {}  # gradients of this step
        self.owners: dict[str, Tensors] = {}  # path -> name in the model -> the parameter
        for path in net.method.paths:
            own = dict(net.model.named_parameters())
            if path in net.bindings.private:
                private = {name: own for name, parameter, own in net.bindings.private[path] if parameter.requires_grad}
                own = {name: own[name] for name in net.masks} | private
            self.owners[path] = {n: p for n, p in own.items() if p.requires_grad or n in net.masks}
        self.aliases = {
            path: {name: p.detach().requires_grad_(p.requires_grad) for name, p in own.items()}
            for path, own in self.owners.items()
        }

    def outputs(self, inputs: Inputs, paths: Iterable[str], track: bool = True) -> Outputs:
        found: Outputs = {}
        with self.streams.forked() as on, torch._dynamo.config.patch(recompile_limit=MAX_VARIANTS):
            for path in paths:
                with on(path):
                    tensors = self.aliases[path], self.besides(path, track), self.net.masks
                    own = inputs.first(self.net.method.share(path))
                    found[path] = self.functions[path](*tensors, own.args, dict(own.kwargs), self.precision())
        return found

    def precision(self) -> torch.dtype | None:
        """Return what the autocast context around the step computes in; None if there is none."""
        kind = self.net.first_mask.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def besides(self, path: str, track: bool) -> Tensors:
        """Return what a path reads besides what it trains; copies of the buffers without ``track``."""
        found = dict(self.net.model.named_buffers()) | self.net.bindings.besides_views(path)
        if not track:
            found |= {name: found[name].clone() for name, _ in self.net.model.named_buffers()}
        return found

    def backward(self, loss: Tensor) -> None:
        owners: dict[Tensor, Tensor] = {}  # what a gradient is asked for -> what it is the gradient of
        for path, own in self.owners.items():
            owners |= {alias: own[name] for name, alias in self.aliases[path].items() if alias.requires_grad}
        owners |= {tensor: tensor for tensor in self.net.state.values() if tensor.requires_grad}
        if self.net.method.adds_gradient:  # to that of the weights themselves
            owners |= {layer.weight: layer.weight for layer in self.net.layers if layer.weight.requires_grad}
        grads = torch.autograd.grad(loss, list(owners), allow_unused=True)
        for owner, grad in zip(owners.values(), grads, strict=True):
            if grad is not None:
                self.found.setdefault(owner, []).append(laid_out_as(owner, grad))

    def finish(self) -> Gradients:
        """Give every parameter the sum of its gradients; None where the loss does not depend on it."""
        for parameter in self.net.parameters():
            parameter.grad = None
        while several := [grads for grads in self.found.values() if len(grads) > 1]:
            totals = torch._foreach_add([grads.pop() for grads in several], [grads.pop() for grads in several])
            for grads, total in zip(several, totals, strict=True):
                grads.append(total)
        found = {owner: grad for owner, (grad,) in self.found.items()}
        for owner, grad in found.items():
            owner.grad = grad
        return found


def laid_out_as(owner: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient with the strides of what it belongs to, which ``backward()`` would see to: optimizers that
    update all parameters in one kernel ask for it."""
    if grad.layout is not torch.strided or grad.stride() == owner.stride():
        return grad
    seen = [(a, b) for a, b, size in zip(grad.stride(), owner.stride(), owner.shape, strict=True) if size > 1]
    if all(a == b for a, b in seen):  # the others are told apart by name alone
        return grad.as_strided(owner.shape, owner.stride())
    return torch.empty_like(owner, dtype=grad.dtype).copy_(grad)


def path_function(net: SparseNet, path: str) -> Callable[..., Any]:
    """Return what computes the output of ``path`` from its own tensors, those that it only reads, and the masks."""
    layers, tied, method, kind = net.layers, net._tied_names, net.method, net.first_mask.device.type
    buffers = [name for name, _ in net.model.named_buffers()]

    def run(own: Tensors, besides: Tensors, masks: Tensors, args: Any, kwargs: Any, half: torch.dtype | None) -> Any:
        given = besides | own
        for layer in layers:
            now = replace(layer, weight=own[layer.name], mask=masks[layer.name])  # type: ignore[arg-type]
            given[layer.name] = method.view(path, now, net.state)
        seen = given | {name: given[first] for name, first in tied.items() if first in given}
        # Said once more: before torch 2.12 compiled code is found on disk without the dtype of a context around it.
        with torch.autocast(kind, half, enabled=half is not None, cache_enabled=False):
            output = functional_call(net.model, seen, args, kwargs, tie_weights=False)
        for name in buffers:
            if seen[name] is not given[name]:  # the module has put another tensor in its place
                given[name].copy_(seen[name].detach())
        return output

    return run


def compiled(function: Callable[..., Any], backend: str | None) -> Callable[..., Any]:
    """Compile the function, a code object of its own: by these compilers remember their variants."""
    if backend is None:
        return function
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace()
    own = types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
    return torch.compile(own, backend=backend, dynamic=False)
