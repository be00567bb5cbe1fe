"""From a torch module to the operators of a plan: a recording gives ATen operators, each has a rule here."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Node

from dcil.errors import UserError
from dcil.runtime.build import Builder, Value
from dcil.runtime.nodes import constants_of, module_of, name_of, owner_of
from dcil.runtime.record import record
from dcil_runtime import Network
from dcil_runtime.format import RELU, Activation

Rule = Callable[["Lowering", Node], Value]


def lower(model: nn.Module, example: Tensor) -> Network:
    """The network as plan operators, with norm layers folded and activations and additions fused."""
    if example.ndim not in (2, 4):
        raise UserError(f"the example input has {example.ndim} dimensions; images have 4, vectors 2")
    training = model.training
    try:
        # Two images, so that nothing can mistake the batch for a dimension of size 1.
        twice = example[:1].detach().cpu().expand(2, *example.shape[1:]).contiguous()
        with torch.no_grad():
            return _lowered(model.eval(), twice)
    finally:
        model.train(training)


def _lowered(model: nn.Module, example: Tensor) -> Network:
    with contextlib.suppress(Exception):  # whatever it is: torch.export knows more, and in which module something is
        return Lowering(*record(model, example, RULES)).run()
    program = torch.export.export(model, (example,), strict=False)
    return Lowering(list(program.graph.nodes), constants_of(program)).run()


class Lowering:
    """One pass over the graph; constants stay tensors, everything else becomes a Value."""

    def __init__(self, nodes: list[Any], constants: dict[str, Tensor]) -> None:
        self.nodes, self.constants = nodes, constants
        inputs = [n for n in self.nodes if n.op == "placeholder" and n.name not in self.constants]
        if len(inputs) != 1:
            raise UserError(f"the network has {len(inputs)} inputs; a plan has one")
        self.builder = Builder(tuple(inputs[0].meta["val"].shape[1:]))
        self.values: dict[Node, Value] = {inputs[0]: self.builder.input}

    def run(self) -> Network:
        self.refuse_unknown()
        for node in self.nodes:
            if node.op == "call_function":
                self.values[node] = RULES[name_of(node)](self, node)
                self.builder.uses(self.values[node], len(node.users))
                if name_of(node).endswith("_"):
                    self.overwrite(node)
        outputs = self.nodes[-1].args[0]
        if not isinstance(outputs, (tuple, list)) or len(outputs) != 1 or outputs[0] not in self.values:
            raise UserError("the network must return one tensor that depends on its input")
        return self.builder.finish(self.values[outputs[0]], outputs[0].meta["val"].ndim)

    def refuse_unknown(self) -> None:
        unknown = [n for n in self.nodes if n.op == "call_function" and name_of(n) not in RULES]
        if unknown:
            named = ", ".join(dict.fromkeys(f"{name_of(n)} in {module_of(n)}" for n in unknown))
            known = ", ".join(sorted({name.removesuffix("_") for name in RULES}))
            raise UserError(f"no CPU kernel for {named}; there are kernels for {known}")

    def overwrite(self, node: Node) -> None:
        """In place: from here on, all that is the operand is the result; nobody may read its memory in other shapes."""
        order = {n: i for i, n in enumerate(self.nodes)}
        for other in list(self.values):
            read = any(order[user] > order[node] for user in other.users)
            if owner_of(other) is owner_of(node):
                self.values[other] = self.values[node]
            elif read and owner_of(other, VIEWS) is owner_of(node, VIEWS):
                raise self.refuse(node, "it works in place on memory that another tensor shares")

    def refuse(self, node: Node, why: str) -> UserError:
        return UserError(f"{name_of(node)} in {module_of(node)}: {why}")

    def value(self, node: Node, place: int = 0) -> Value:
        found = self.values.get(node.args[place])  # type: ignore[arg-type]
        if found is None:
            raise self.refuse(node, "an operand that does not depend on the network's input")
        return found

    def constant(self, node: Node, place: int, size: int, default: float) -> np.ndarray[Any, np.dtype[np.float64]]:
        given = self.argument(node, place, None)
        if given is None:
            return np.full(size, default)
        return self.tensor(node, given).double().numpy()

    def tensor(self, node: Node, given: Any) -> Tensor:
        if not isinstance(given, Node) or given.name not in self.constants:
            raise self.refuse(node, "a weight that is computed by the network")
        return self.constants[given.name].detach().cpu()

    def argument(self, node: Node, place: int, default: Any) -> Any:
        """By position, or by name where the operator was called so."""
        if place < len(node.args):
            return node.args[place]
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        return node.kwargs.get(schema[place].name, default)


def _pair(value: Any, default: int) -> tuple[int, int]:
    if value is None or value == []:
        return default, default
    if isinstance(value, int):
        return value, value
    return (value[0], value[0]) if len(value) == 1 else (value[0], value[1])


def _window(k: tuple[int, int], s: tuple[int, int], p: tuple[int, int], d: tuple[int, int]) -> tuple[int, ...]:
    return (*k, *s, *p, *p, *d)


def conv(low: Lowering, node: Node) -> Value:
    weight = low.tensor(node, node.args[1])
    stride, dilation = _pair(low.argument(node, 3, None), 1), _pair(low.argument(node, 5, None), 1)
    padding, size = low.argument(node, 4, 0), (weight.shape[2], weight.shape[3])
    if isinstance(padding, str):
        total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, size, strict=True)]
        top, left = total[0] // 2, total[1] // 2
        window: tuple[int, ...] = (*size, *stride, top, left, total[0] - top, total[1] - left, *dilation)
    else:
        window = _window(size, stride, _pair(padding, 0), dilation)
    bias = low.constant(node, 2, weight.shape[0], 0.0)
    groups = int(low.argument(node, 6, 1))
    return low.builder.layer("conv", low.value(node), weight.float().numpy(), bias, window, groups)


def linear(low: Lowering, node: Node) -> Value:
    weight = low.tensor(node, node.args[1])
    if node.args[0].meta["val"].ndim != 2:  # type: ignore[union-attr]
        raise low.refuse(node, "its input is not one vector per image")
    bias = low.constant(node, 2, weight.shape[0], 0.0)
    return low.builder.layer("linear", low.value(node), weight.float().numpy(), bias)


def batch_norm(low: Lowering, node: Node) -> Value:
    if low.argument(node, 3, None) is None or low.argument(node, 5, False):
        raise low.refuse(node, "it uses the batch's own statistics")
    mean, var = low.constant(node, 3, 0, 0.0), low.constant(node, 4, 0, 1.0)
    scale = low.constant(node, 1, mean.size, 1.0) / np.sqrt(var + float(low.argument(node, 7, 1e-5)))
    shift = low.constant(node, 2, mean.size, 0.0) - mean * scale
    return low.builder.affine(low.value(node), scale, shift)


def activation(act: Activation) -> Rule:
    return lambda low, node: low.builder.activate(low.value(node), act)


def hardtanh(low: Lowering, node: Node) -> Value:
    low_end, high_end = low.argument(node, 1, -1.0), low.argument(node, 2, 1.0)
    return low.builder.activate(low.value(node), ("clamp", float(low_end), float(high_end)))


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
    shapes = {tuple(arg.meta["val"].shape) for arg in node.args if isinstance(arg, Node)}
    if len(shapes) > 1:
        raise low.refuse(node, f"tensors of different shapes {sorted(shapes)}")
    return low.builder.add(low.value(node, 0), low.value(node, 1))


def cat(low: Lowering, node: Node) -> Value:
    parts = node.args[0]
    if low.argument(node, 1, 0) not in (1, 1 - node.meta["val"].ndim):
        raise low.refuse(node, "only along the channels (dimension 1)")
    if not isinstance(parts, (list, tuple)) or any(part not in low.values for part in parts):
        raise low.refuse(node, "an operand that does not depend on the network's input")
    return low.builder.plain("concat", [low.values[part] for part in parts])  # type: ignore[index]


def _pool_window(low: Lowering, node: Node, dilation: tuple[int, int]) -> tuple[int, ...]:
    """The window; rounding up becomes more padding below and right, exactly as much as the output's shape says."""
    size, pad = _pair(node.args[1], 1), _pair(low.argument(node, 3, 0), 0)
    stride = _pair(low.argument(node, 2, None), 0)
    stride = (stride[0] or size[0], stride[1] or size[1])
    ends = []
    for i in (0, 1):
        shape_in, shape_out = node.args[0].meta["val"].shape[2 + i], node.meta["val"].shape[2 + i]  # type: ignore[union-attr]
        need = (shape_out - 1) * stride[i] + dilation[i] * (size[i] - 1) + 1 - shape_in - pad[i]
        ends.append(max(need, 0))
    return (*size, *stride, *pad, *ends, *dilation)


def max_pool(low: Lowering, node: Node) -> Value:
    dilation = _pair(low.argument(node, 4, 1), 1)
    return low.builder.plain("maxpool", [low.value(node)], _pool_window(low, node, dilation))


def avg_pool(low: Lowering, node: Node) -> Value:
    if low.argument(node, 6, None) is not None:
        raise low.refuse(node, "divisor_override")
    window = _pool_window(low, node, (1, 1))
    count = int(bool(low.argument(node, 5, True)))
    return low.builder.plain("avgpool", [low.value(node)], window, count)


def adaptive_pool(low: Lowering, node: Node) -> Value:
    (height, width), (rows, columns) = node.args[0].meta["val"].shape[2:], node.meta["val"].shape[2:]  # type: ignore[union-attr]
    if (rows, columns) == (1, 1):
        return low.builder.plain("mean", [low.value(node)])
    if height % rows or width % columns:
        raise low.refuse(node, f"{height} x {width} does not divide into {rows} x {columns}")
    size = (height // rows, width // columns)
    return low.builder.plain("avgpool", [low.value(node)], _window(size, size, (0, 0), (1, 1)))


def mean(low: Lowering, node: Node) -> Value:
    given = low.argument(node, 1, None) or []
    dims = sorted(d % 4 for d in ([given] if isinstance(given, int) else given))
    if node.args[0].meta["val"].ndim != 4 or dims != [2, 3]:  # type: ignore[union-attr]
        raise low.refuse(node, "only the mean over height and width")
    return low.builder.plain("mean", [low.value(node)])


def reshape(low: Lowering, node: Node) -> Value:
    before, after = tuple(node.args[0].meta["val"].shape), tuple(node.meta["val"].shape)  # type: ignore[union-attr]
    if before == after:
        return low.value(node)
    if after[0] == before[0] and len(after) == 2:
        return low.builder.plain("flatten", [low.value(node)])
    raise low.refuse(node, f"from {list(before[1:])} to {list(after[1:])}; only to one vector per image")


def same(low: Lowering, node: Node) -> Value:
    return low.value(node)


def dropout(low: Lowering, node: Node) -> Value:
    if low.argument(node, 2, False):
        raise low.refuse(node, "it is in training mode")
    return low.value(node)


RESHAPES, COPIES = ("flatten", "view", "reshape", "squeeze"), ("contiguous", "clone", "alias", "detach")
DROPOUTS = ("dropout", "feature_dropout")
VIEWS = (*RESHAPES, "contiguous", "alias", "detach", *DROPOUTS)  # of their operand's memory, at least sometimes
RULES: dict[str, Rule] = {
    "conv2d": conv,
    "linear": linear,
    "batch_norm": batch_norm,
    "relu": activation(RELU),
    "relu6": activation(("clamp", 0.0, 6.0)),
    "silu": activation(("silu", 0.0, 0.0)),
    "hardswish": activation(("hardswish", 0.0, 0.0)),
    "hardtanh": hardtanh,
    "clamp": clamp,
    "leaky_relu": leaky_relu,
    "add": add,
    "cat": cat,
    "max_pool2d": max_pool,
    "avg_pool2d": avg_pool,
    "adaptive_avg_pool2d": adaptive_pool,
    "mean": mean,
    **dict.fromkeys(RESHAPES, reshape),
    **dict.fromkeys(COPIES, same),
    **dict.fromkeys(DROPOUTS, dropout),
}
RULES |= {f"{name}_": rule for name, rule in RULES.items()}
