"""A network's ATen operators, written down while it runs once.

torch.export finds the same ones and more, but what it imports and traces takes longer than all the rest of an export.
Whatever is not plainly an operator with a kernel ends the recording, and torch.export has the word.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode

#: What Python calls an operator that has another name in ATen, and the overloads that are not the first.
NAMES = {"__add__": "add", "__radd__": "add", "__iadd__": "add_"}
OVERLOADS = {"mean": "dim"}
#: What a forward may ask of a tensor without looking at its numbers.
QUESTIONS = ("__get__", "size", "dim", "numel", "is_contiguous", "is_floating_point", "__len__")


class NotRecordedError(Exception):
    """The network does something else than running known operators one after the other."""


class Recording(TorchFunctionMode):
    """While open, calls of operators among ``known`` become nodes of ``graph`` as torch.export would leave them, their
    results' shapes in meta["val"]. Parameters and buffers become placeholders and stand in ``constants``."""

    def __init__(self, model: nn.Module, known: Collection[str]) -> None:
        super().__init__()
        self.graph, self.known = Graph(), known
        self.constants: dict[str, Tensor] = {}
        self.of_the_model = {id(t): t for t in (*model.parameters(), *model.buffers())}
        # Weak, so that activations are freed as ever; an address that is used again belongs to another tensor.
        # With its version: what changed a tensor in place unseen (TorchScript) was not recorded.
        self.nodes: dict[int, tuple[weakref.ref[Tensor], int, Node]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = NAMES.get(func.__name__, func.__name__) + "_" * bool(kwargs.get("inplace"))
        if name not in self.known or not _of_torch(func):
            out = func(*args, **kwargs)
            if name not in QUESTIONS or isinstance(out, Tensor):
                raise NotRecordedError(name)
            return out
        overloads = getattr(torch.ops.aten, name)
        target = getattr(overloads, OVERLOADS.get(name) or overloads.overloads()[0])
        placed, named = _as_schema(target._schema.arguments, *_as_aten(func, args, kwargs))
        node = self.graph.call_function(target, self.given(placed), self.given(named))  # before it works in place
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor):
            raise NotRecordedError(name)
        self.remember(out, node)
        return out

    def remember(self, tensor: Tensor, node: Node) -> None:
        node.meta["val"] = torch.empty(tensor.shape, device="meta")
        self.nodes[id(tensor)] = weakref.ref(tensor), tensor._version, node

    def given(self, value: Any) -> Any:
        """An argument with nodes in place of tensors."""
        if isinstance(value, (tuple, list)):
            return tuple(self.given(item) for item in value)
        if isinstance(value, dict):
            return {key: self.given(item) for key, item in value.items()}
        return self.node(value) if isinstance(value, Tensor) else value

    def node(self, tensor: Tensor) -> Node:
        seen, version, node = self.nodes.get(id(tensor), (None, 0, None))
        if seen is not None and node is not None and seen() is tensor:
            if version != tensor._version:
                raise NotRecordedError("a tensor that something unseen has changed")
            return node
        if id(tensor) not in self.of_the_model:
            raise NotRecordedError("a tensor from elsewhere")
        node = self.graph.placeholder(f"constant_{len(self.constants)}")
        self.constants[node.name] = tensor
        self.remember(tensor, node)
        return node


def _of_torch(func: Callable[..., Any]) -> bool:
    """One of torch's own functions, not somebody's operator of the same name."""
    return any(func is getattr(place, func.__name__, None) for place in (torch, F, Tensor))


def _as_aten(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Functions of torch.nn.functional call a few arguments otherwise than their operators do."""
    kwargs = {key: value for key, value in kwargs.items() if key not in ("inplace", "return_indices")}
    if "training" in kwargs and "dropout" in func.__name__:
        kwargs["train"] = kwargs.pop("training")
    if func is F.batch_norm:  # statistics come before the weights there
        args, kwargs = args[:1], {"running_mean": args[1], "running_var": args[2], "cudnn_enabled": False, **kwargs}
    return args, kwargs


def _as_schema(schema: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """By position what has one, as far as there is something for every place; by name the rest."""
    kwargs, names = dict(kwargs), [a.name for a in schema if not a.kwarg_only]
    placed = list(args)
    while len(placed) < len(names) and names[len(placed)] in kwargs:
        placed.append(kwargs.pop(names[len(placed)]))
    if not set(kwargs) <= {a.name for a in schema}:
        raise NotRecordedError(f"arguments {sorted(kwargs)}")
    return tuple(placed), kwargs


def record(model: nn.Module, example: Tensor, known: Collection[str]) -> tuple[list[Node], dict[str, Tensor]]:
    """The nodes of ``model`` (in evaluation mode) at ``example``, and its parameters and buffers among them."""
    recording = Recording(model, known)
    recording.remember(example, recording.graph.placeholder("x"))
    with recording:
        out = model(example)
    if not isinstance(out, Tensor):
        raise NotRecordedError("an output that is no tensor")
    recording.graph.output((recording.node(out),))
    return list(recording.graph.nodes), recording.constants
