"""Lower a torch module to the operators of a plan: the traced graph has ATen operators, each with a rule here."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from dcil.errors import UserError
from dcil.runtime.build import Builder, Value
from dcil.tracing import place_of, trace
from dcil_runtime import Network
from dcil_runtime.format import RELU, Activation

Rule = Callable[["Lowering", Node], Value]
aten = torch.ops.aten


def lower(model: nn.Module, example: Tensor) -> Network:
    """Return the network in evaluation as plan operators, norm layers folded, activations and additions fused."""
    if example.ndim not in (2, 4):
        raise UserError(f"the example input must have 4 dimensions (images) or 2 (vectors), got {example.ndim}")
    with torch.no_grad():
        return Lowering(trace(model, example, training=False, leaf=lambda module: False)).run()


class Lowering:
    """One pass over the graph: what depends on the input becomes a Value, everything else is computed here."""

    def __init__(self, traced: fx.GraphModule) -> None:
        self.traced, self.nodes = traced, list(traced.graph.nodes)
        source = self.nodes[0]
        self.builder = Builder(shape_of(source)[1:])
        self.values: dict[Any, Value] = {source: self.builder.input}
        self.constants: dict[Any, Tensor] = {}

    def run(self) -> Network:
        for node in self.nodes:
            self.fold(node)
        self.refuse_unknown()
        for node in self.nodes:
            if self.computes(node):
                self.values[node] = RULES[name_of(node)](self, node)
                self.builder.uses(self.values[node], len(node.users))
        output = self.nodes[-1].args[0]
        if output not in self.values:
            raise UserError("the network must return one tensor that depends on its input")
        return self.builder.finish(self.values[output], len(shape_of(output)))

    def fold(self, node: Node) -> None:
        """Compute a node that depends on parameters and other constants alone."""
        if node.op == "get_attr":
            tensor: Tensor = operator.attrgetter(str(node.target))(self.traced)
            self.constants[node] = tensor.detach().cpu()
        elif node.op == "call_function" and all(n in self.constants for n in node.all_input_nodes):
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                return
            take = self.constants.__getitem__
            args, kwargs = fx.map_arg(node.args, take), fx.map_arg(node.kwargs, take)
            self.constants[node] = node.target(*args, **kwargs)  # type: ignore[operator]

    def computes(self, node: Node) -> bool:
        """Return whether the plan needs an operator for it; a plan has no batch, so sizes of the batch need none."""
        return node.op == "call_function" and node not in self.constants and "shape" in node.meta

    def refuse_unknown(self) -> None:
        unknown = [n for n in self.nodes if self.computes(n) and name_of(n) not in RULES]
        if unknown:
            named = ", ".join(dict.fromkeys(f"{name_of(n)} in {place_of(n)}" for n in unknown))
            raise UserError(f"no CPU kernel for {named}; there are kernels for {', '.join(sorted(RULES))}")

    def refuse(self, node: Node, why: str) -> UserError:
        return UserError(f"{name_of(node)} in {place_of(node)}: {why}")

    def value(self, node: Node, place: int = 0) -> Value:
        """Return the operand at ``place``, which must depend on the input."""
        found = self.values.get(node.args[place])
        if found is None:
            raise self.refuse(node, "an operand that does not depend on the network's input")
        return found

    def constant(self, node: Node, place: int, size: int, default: float) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the vector at ``place``, or ``size`` times ``default`` without one."""
        if node.args[place] is None:
            return np.full(size, default)
        return self.tensor(node, place).double().numpy()

    def tensor(self, node: Node, place: int) -> Tensor:
        found = self.constants.get(node.args[place])
        if found is None:
            raise self.refuse(node, "a weight that depends on the network's input")
        return found

    def argument(self, node: Node, place: int, default: Any) -> Any:
        return node.args[place] if place < len(node.args) else default


def name_of(node: Node) -> str:
    """Return an operator's name, with its namespace unless it is ATen's."""
    schema = getattr(node.target, "_schema", None)
    return "getitem" if schema is None else str(schema.name).removeprefix("aten::")


def shape_of(node: Any) -> tuple[int, ...]:
    found: tuple[int, ...] = node.meta["shape"]
    return found


def _pair(value: Any) -> tuple[int, int]:
    return (value[0], value[0]) if len(value) == 1 else (value[0], value[1])


def conv(low: Lowering, node: Node) -> Value:
    weight = low.tensor(node, 1)
    if weight.ndim != 4 or node.args[6]:
        raise low.refuse(node, "only a two-dimensional convolution, not transposed")
    stride, pad, dilation = (_pair(node.args[place]) for place in (3, 4, 5))
    left, right, top, bottom = _zeros_around(node.args[0])
    sides = (pad[0] + top, pad[1] + left, pad[0] + bottom, pad[1] + right)
    window = (weight.shape[2], weight.shape[3], *stride, *sides, *dilation)
    bias = low.constant(node, 2, weight.shape[0], 0.0)
    return low.builder.layer("conv", low.value(node), weight.float().numpy(), bias, window, int(node.args[8]))  # type: ignore[arg-type]


def _zeros_around(source: Any) -> tuple[int, ...]:
    """Return the padding of ``source`` (left, right, top, bottom); uneven padding="same" is a node of its own."""
    return tuple(source.args[1]) if source.target is aten.constant_pad_nd.default else (0, 0, 0, 0)


def pad(low: Lowering, node: Node) -> Value:
    zeros = low.argument(node, 2, 0) == 0 and len(node.args[1]) == 4 and min(node.args[1]) >= 0  # type: ignore[arg-type]
    if not zeros or any(user.target is not aten.convolution.default for user in node.users):
        raise low.refuse(node, "only zeros around the input of a convolution")
    return low.value(node)


def linear(low: Lowering, node: Node) -> Value:
    """Lower addmm(bias, x, weight') or mm(x, weight')."""
    first = len(node.args) - 2
    if node.kwargs:
        raise low.refuse(node, f"only without {', '.join(node.kwargs)}")
    weight = low.tensor(node, first + 1).t()
    bias = low.constant(node, 0, 0, 0.0) if first else np.zeros(len(weight))
    return low.builder.layer("linear", low.value(node, first), weight.float().numpy(), bias)


def batch_norm(low: Lowering, node: Node) -> Value:
    if node.args[3] is None or node.args[5]:
        raise low.refuse(node, "it uses the batch's own statistics")
    mean, var = low.constant(node, 3, 0, 0.0), low.constant(node, 4, 0, 1.0)
    scale = low.constant(node, 1, mean.size, 1.0) / np.sqrt(var + float(node.args[7]))  # type: ignore[arg-type]
    shift = low.constant(node, 2, mean.size, 0.0) - mean * scale
    return low.builder.affine(low.value(node), scale, shift)


def first_result(low: Lowering, node: Node) -> Value:
    if node.args[1] != 0:
        raise low.refuse(node, f"only the first result of {name_of(node.args[0])}")  # type: ignore[arg-type]
    return low.value(node)


def activation(act: Activation) -> Rule:
    return lambda low, node: low.builder.activate(low.value(node), act)


def hardtanh(low: Lowering, node: Node) -> Value:
    least, most = low.argument(node, 1, -1.0), low.argument(node, 2, 1.0)
    return low.builder.activate(low.value(node), ("clamp", float(least), float(most)))


def clamp(low: Lowering, node: Node) -> Value:
    ends = low.argument(node, 1, None), low.argument(node, 2, None)
    if any(isinstance(end, Node) for end in ends):
        raise low.refuse(node, "its ends are tensors")
    least, most = -math.inf if ends[0] is None else float(ends[0]), math.inf if ends[1] is None else float(ends[1])
    return low.builder.activate(low.value(node), ("clamp", least, most))


def leaky_relu(low: Lowering, node: Node) -> Value:
    return low.builder.activate(low.value(node), ("leaky", float(low.argument(node, 1, 0.01)), 0.0))


def add(low: Lowering, node: Node) -> Value:
    if not isinstance(node.args[1], Node) or node.kwargs.get("alpha", 1) != 1:
        raise low.refuse(node, "only the sum of two tensors")
    shapes = {shape_of(arg) for arg in node.args}
    if len(shapes) > 1:
        raise low.refuse(node, f"tensors of different shapes {sorted(shapes)}")
    return low.builder.add(low.value(node, 0), low.value(node, 1))


def cat(low: Lowering, node: Node) -> Value:
    parts: Any = node.args[0]
    if low.argument(node, 1, 0) not in (1, 1 - len(shape_of(node))):
        raise low.refuse(node, "only along the channels (dimension 1)")
    if any(part not in low.values for part in parts):
        raise low.refuse(node, "an operand that does not depend on the network's input")
    return low.builder.plain("concat", [low.values[part] for part in parts])


def _pool_window(low: Lowering, node: Node, dilation: tuple[int, int]) -> tuple[int, ...]:
    """Return the pooling window; rounding up becomes padding below and right, as the output's shape demands."""
    size, pad = _pair(node.args[1]), _pair(low.argument(node, 3, [0]))
    stride = _pair(low.argument(node, 2, None) or size)
    ends = []
    for i in (0, 1):
        before, after = shape_of(node.args[0])[2 + i], shape_of(node)[2 + i]
        need = (after - 1) * stride[i] + dilation[i] * (size[i] - 1) + 1 - before - pad[i]
        ends.append(max(need, 0))
    return (*size, *stride, *pad, *ends, *dilation)


def max_pool(low: Lowering, node: Node) -> Value:
    dilation = _pair(low.argument(node, 4, [1]))
    return low.builder.plain("maxpool", [low.value(node)], _pool_window(low, node, dilation))


def avg_pool(low: Lowering, node: Node) -> Value:
    if low.argument(node, 6, None) is not None:
        raise low.refuse(node, "divisor_override")
    window = _pool_window(low, node, (1, 1))
    count = int(bool(low.argument(node, 5, True)))
    return low.builder.plain("avgpool", [low.value(node)], window, count)


def adaptive_pool(low: Lowering, node: Node) -> Value:
    (height, width), (rows, columns) = shape_of(node.args[0])[2:], shape_of(node)[2:]
    if height % rows or width % columns:
        raise low.refuse(node, f"{height} x {width} does not divide into {rows} x {columns}")
    size = (height // rows, width // columns)
    return low.builder.plain("avgpool", [low.value(node)], (*size, *size, 0, 0, 0, 0, 1, 1))


def mean(low: Lowering, node: Node) -> Value:
    dims: Any = low.argument(node, 1, None) or []
    if len(shape_of(node.args[0])) != 4 or sorted(d % 4 for d in dims) != [2, 3]:
        raise low.refuse(node, "only the mean over height and width")
    return low.builder.plain("mean", [low.value(node)])


def reshape(low: Lowering, node: Node) -> Value:
    before, after = shape_of(node.args[0]), shape_of(node)
    if before == after:
        return low.value(node)
    if after[0] == before[0] and len(after) == 2:
        return low.builder.plain("flatten", [low.value(node)])
    raise low.refuse(node, f"from {list(before[1:])} to {list(after[1:])}; only to one vector per image")


def same(low: Lowering, node: Node) -> Value:
    return low.value(node)


RULES: dict[str, Rule] = {
    "convolution": conv,
    "constant_pad_nd": pad,
    "addmm": linear,
    "mm": linear,
    "native_batch_norm": batch_norm,
    "relu": activation(RELU),
    "silu": activation(("silu", 0.0, 0.0)),
    "hardswish": activation(("hardswish", 0.0, 0.0)),
    "hardtanh": hardtanh,
    "clamp": clamp,
    "leaky_relu": leaky_relu,
    "add": add,
    "cat": cat,
    "max_pool2d_with_indices": max_pool,
    "avg_pool2d": avg_pool,
    "_adaptive_avg_pool2d": adaptive_pool,
    "mean": mean,
    "getitem": first_result,
    **dict.fromkeys(("flatten", "reshape", "squeeze"), reshape),
    **dict.fromkeys(("detach", "alias"), same),
}
