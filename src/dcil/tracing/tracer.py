"""Run a network once on tensors without data and write down the operators that it calls.

torch.fx and torch.export replace ``nn.Module.__call__`` and set flags for the whole process while they trace, which
reaches the networks that other threads train meanwhile. A dispatch mode belongs to its thread, and every operator
passes it: those called by a module, a function or TorchScript, and custom ones.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode

from dcil.errors import UserError

aten = torch.ops.aten
#: Operators whose result is their operand: nothing in the graph works in place, so no copy is needed.
COPIES = (aten.clone.default, aten.lift_fresh.default, aten.lift.default)
RESHAPES = (aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)


class TracingError(UserError):
    """The network cannot be written as a graph of operators."""


def is_torch_module(module: nn.Module) -> bool:
    """Whether ``module`` is a layer of torch.nn, which becomes one node; containers are looked into."""
    return type(module).__module__.startswith("torch.nn") and not isinstance(module, nn.Sequential)


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """A dispatch mode that writes the operators called while it is open into ``graph``.

    A tensor is known by identity. Operators that work in place are written as those that do not: from then on the
    tensor's node is the result's. Views share a version counter with their base, so that a tensor whose memory was
    changed through another one is found out when it is read.
    """

    def __init__(self, model: nn.Module, leaf: Callable[[nn.Module], bool], device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.graph, self.device = Graph(), device
        self.known: dict[int, tuple[Tensor, Node]] = {}  # with the tensor, so that its address is not used again
        self.versions: dict[int, int] = {}  # of the known tensors when they were computed
        self.unsettled: list[Tensor] = []
        self.names: dict[int, str] = {}  # of the parameters and buffers, the model's own and those without data
        self.constants: dict[str, Tensor] = {}  # tensors that are neither the model's nor computed
        self.without_data: dict[int, tuple[Tensor, Tensor]] = {}
        self.modules: list[tuple[str, str]] = [("", type(model).__name__)]  # those being called: (name, class)
        self.inside_leaf = False
        self.model = self.copy_of(model)
        for name, module in self.model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self.intercept(name, module, bool(name) and leaf(module))

    def copy_of(self, model: nn.Module) -> nn.Module:
        """A copy of the model whose parameters and buffers have shapes and no data."""
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        memo: dict[int, Any] = {}
        for name, tensor in named:
            self.names.setdefault(id(tensor), name)
            empty = torch.empty_like(tensor, device="meta")
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, tensor.requires_grad)
            memo.setdefault(id(tensor), empty)
            self.names.setdefault(id(memo[id(tensor)]), name)
        return copy.deepcopy(model, memo)

    def intercept(self, name: str, module: nn.Module, is_leaf: bool) -> None:
        """Replace the forward of one module of the copy, so that the tracer knows when it is called."""
        forward = module.forward

        @functools.wraps(forward)
        def called(*args: Any, **kwargs: Any) -> Any:
            with self.calling(name, module):
                return self.call_leaf(name, module, forward, args, kwargs) if is_leaf else forward(*args, **kwargs)

        module.forward = called
        if is_leaf:  # they are the node's: the graph calls the module with its hooks
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()

    @contextmanager
    def calling(self, name: str, module: nn.Module) -> Iterator[None]:
        self.modules.append((name, type(module).__name__))
        yield  # an error leaves the module on the stack, for the message
        self.modules.pop()

    def call_leaf(
        self, name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if self.inside_leaf:
            return forward(*args, **kwargs)
        self.settle()
        node = self.graph.call_module(name, self.nodes(args), self.nodes(kwargs))
        # The shapes are the same in both modes, and a batch norm without data in training takes long.
        training, self.inside_leaf = module.training, True
        module.eval()
        out = forward(*args, **kwargs)
        module.train(training)
        self.inside_leaf = False
        self.define(out, node)
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        self.settle()
        if self.inside_leaf:
            return self.run(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            raise TracingError("it asks for the value of a tensor, which depends on the input")
        if func in COPIES:
            node = self.node(args[0])
            out = self.run(func, args, kwargs)
        else:
            target = functional(func)
            placed, named = self.nodes(args), self.nodes(kwargs)
            out = self.run(func, args, kwargs)
            if func in RESHAPES:
                target, placed = reshape(args[0], out, placed)
            elif func._opname.startswith("upsample_"):
                target, placed = upsample(func, placed)
            node = self.graph.call_function(target, placed, named)
        self.define(out, node)
        return out

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call the operator for the shapes of its results; nothing is computed and no device is used."""
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*self.emptied(args), **self.emptied(kwargs))

    def emptied(self, value: Any) -> Any:
        """``value`` with tensors without data in place of those that have some."""
        if isinstance(value, Tensor):
            if value.is_meta:
                return value
            return self.without_data.setdefault(id(value), (value, torch.empty_like(value, device="meta")))[1]
        return map_items(self.emptied, value)

    def define(self, out: Any, node: Node) -> None:
        """Say that ``node`` computes ``out``, a tensor or a nest of them."""
        node.meta.setdefault("module", self.modules[-1])
        if isinstance(out, Tensor):
            node.meta.setdefault("shape", tuple(out.shape))
            # torch counts changes, and gives a view its base's counter, after the operator has returned to it.
            self.known[id(out)] = out, node
            self.versions[id(out)] = -1
            self.unsettled.append(out)
        elif isinstance(out, (tuple, list)):
            node.meta["shape"] = tuple(out[0].shape) if out and isinstance(out[0], Tensor) else ()
            for i, item in enumerate(out):
                if isinstance(item, (Tensor, tuple, list)):
                    self.define(item, self.graph.call_function(operator.getitem, (node, i)))

    def nodes(self, value: Any) -> Any:
        """An argument with nodes in place of tensors, and with the device on which the network is."""
        if isinstance(value, Tensor):
            return self.node(value)
        if isinstance(value, torch.device):
            return self.device if value.type == "meta" else value
        return map_items(self.nodes, value)

    def node(self, tensor: Tensor) -> Node:
        if id(tensor) not in self.known:
            return self.constant(tensor)
        if self.versions[id(tensor)] != tensor._version:
            raise TracingError("it reads memory that another tensor shares and that was changed in place")
        return self.known[id(tensor)][1]

    def settle(self) -> None:
        """Note the versions of the tensors that the operator before this one has computed."""
        self.versions |= {id(tensor): tensor._version for tensor in self.unsettled}
        self.unsettled.clear()

    def constant(self, tensor: Tensor) -> Node:
        name = self.names.get(id(tensor))
        if name is None:
            name = f"_constant_{len(self.constants)}"
            self.constants[name] = tensor
        node = self.graph.create_node("get_attr", name)
        self.define(tensor, node)
        self.versions[id(tensor)] = tensor._version  # the operator that reads it may do so twice
        return node


def map_items(change: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``change`` applied to the items of a list, tuple or dict."""
    if isinstance(value, (tuple, list)):
        items = [change(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: change(item) for key, item in value.items()}
    return value


def place_of(node: Node) -> str:
    """The module that called an operator, for a message."""
    return named(*node.meta.get("module", ("", "")))


def named(name: str, kind: str) -> str:
    return f"module {name!r} ({kind})" if name else "the network itself"


def functional(func: Any) -> Any:
    """The operator that gives the result of ``func`` without writing it into an operand."""
    if not func._schema.is_mutable:
        return func
    namespace, _, name = func._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    names = [argument.name for argument in func._schema.arguments]
    for overload in packet.overloads() if packet is not None and name.endswith("_") else ():
        found = getattr(packet, overload)
        if not found._schema.is_mutable and (
            overload == func._overloadname or [argument.name for argument in found._schema.arguments] == names
        ):
            return found
    raise TracingError(f"{func} writes into its operands and has no form that does not")


def reshape(source: Tensor, out: Tensor, args: Any) -> tuple[Any, Any]:
    """A reshape to one vector per item as flatten, which holds for every size; any other as it was asked for."""
    if out.ndim == 2 and source.ndim >= 2 and out.shape[0] == source.shape[0]:
        return aten.flatten.using_ints, (args[0], 1)
    return aten.reshape.default, args


def upsample(func: Any, args: Any) -> tuple[Any, Any]:
    """By the factors where the network gave some, not by the size that they came to."""
    size, others = args[1], args[2:]
    factors = others[len(others) - len(size) :]
    if "vec" not in func.overloadpacket.overloads() or len(factors) < len(size) or None in factors:
        return func, args
    return func.overloadpacket.vec, (args[0], None, *others[: -len(size)], list(factors))
