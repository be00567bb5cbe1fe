"""Activations, and sums, products and quotients of two tensors or of a tensor and constants."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.fx import Node

from dcil.runtime.forms import Placed, is_complete
from dcil.runtime.nodes import argument, shape_of
from dcil.runtime.rules.rule import Rule
from dcil_runtime.format import RELU, Activation

if TYPE_CHECKING:
    from dcil.runtime.lower import Lowering


def activated(low: Lowering, node: Node, act: Activation) -> Placed:
    """Apply an activation to what the operand lies in, in whatever order that is."""
    placed = low.arranged(node, node.args[0])
    return Placed(low.builder.activate(placed.value, act), placed.shape, placed.index)


def activation(act: Activation) -> Rule:
    return lambda low, node: activated(low, node, act)


def named(name: str) -> Rule:
    return activation((name, 0.0, 0.0))


def hardtanh(low: Lowering, node: Node) -> Placed:
    least, most = argument(node, 1, -1.0), argument(node, 2, 1.0)
    return activated(low, node, ("clamp", float(least), float(most)))


def clamp(low: Lowering, node: Node) -> Placed:
    ends = argument(node, 1, None), argument(node, 2, None)
    if any(isinstance(end, Node) for end in ends):
        raise low.refuse(node, "its ends are tensors")
    least, most = -math.inf if ends[0] is None else float(ends[0]), math.inf if ends[1] is None else float(ends[1])
    return activated(low, node, ("clamp", least, most))


def leaky_relu(low: Lowering, node: Node) -> Placed:
    return activated(low, node, ("leaky", float(argument(node, 1, 0.01)), 0.0))


def gelu(low: Lowering, node: Node) -> Placed:
    return activated(low, node, ("gelu" if node.kwargs.get("approximate", "none") == "none" else "gelu_tanh", 0.0, 0.0))


def elu(low: Lowering, node: Node) -> Placed:
    if any(factor != 1 for factor in node.args[2:]):
        raise low.refuse(node, "a scale")
    return activated(low, node, ("elu", float(argument(node, 1, 1.0)), 0.0))


# -- two operands ------------------------------------------------------------------------------------------------------


def affine(low: Lowering, node: Node, source: Any, scale: Any, shift: Any) -> Placed:
    """Return scale * x + shift, with numbers or constant tensors."""
    first = low.arranged(node, source)
    factor, offset = (low.constant_beside(node, constant, first) for constant in (scale, shift))
    value, channels = first.value, first.shape[0]
    if factor.shape[1] == offset.shape[1] == 1:
        vectors = [np.broadcast_to(vector[:, 0], channels) for vector in (factor, offset)]
        return Placed(low.builder.affine(value, *vectors), first.shape, first.index)
    for kind, constant, neutral in (("mul", factor, 1), ("add", offset, 0)):
        if (constant != neutral).any():
            shape = (len(constant), *(first.shape[1:] if constant.shape[1] > 1 else (1, 1)))
            value = low.builder.plain(kind, [value, low.builder.constant(constant.reshape(shape))])
    return Placed(value, first.shape, first.index)


def constant_of(low: Lowering, operand: Any) -> Any:
    """Return the number or constant tensor that an operand is, None for what depends on the input."""
    return low.constants.get(operand) if isinstance(operand, Node) else operand


def add(low: Lowering, node: Node) -> Placed:
    return total(low, node, 1.0)


def sub(low: Lowering, node: Node) -> Placed:
    return total(low, node, -1.0)


def total(low: Lowering, node: Node, sign: float) -> Placed:
    """Return a + sign alpha b."""
    a, b = node.args[:2]
    factor = sign * float(node.kwargs.get("alpha", 1))  # type: ignore[arg-type]
    first, second = constant_of(low, a), constant_of(low, b)
    if second is not None:
        return affine(low, node, a, 1.0, factor * second)
    if first is not None:
        return affine(low, node, b, factor, first)
    if abs(factor) != 1:
        raise low.refuse(node, "only with alpha = 1")
    return joined(low, node, "add" if factor == 1 else "sub", a, b)


def rsub(low: Lowering, node: Node) -> Placed:
    """Lower b - a."""
    if argument(node, 2, 1) != 1:
        raise low.refuse(node, "only with alpha = 1")
    constant = constant_of(low, node.args[1])
    return (
        joined(low, node, "sub", *node.args[1::-1])
        if constant is None
        else affine(low, node, node.args[0], -1.0, constant)
    )


def mul(low: Lowering, node: Node) -> Placed:
    a, b = node.args
    if node in low.scaled:
        return low.placed(node, a)
    for source, other in ((a, b), (b, a)):
        constant = constant_of(low, other)
        if constant is not None:
            return affine(low, node, source, constant, 0.0)
    return joined(low, node, "mul", a, b)


def div(low: Lowering, node: Node) -> Placed:
    a, b = node.args
    if node in low.scaled:
        return low.placed(node, a)
    constant = constant_of(low, b)
    if node.kwargs.get("rounding_mode") is not None or constant_of(low, a) is not None:
        raise low.refuse(node, "only a tensor over a tensor or a constant, not rounded")
    return joined(low, node, "div", a, b) if constant is None else affine(low, node, a, 1.0 / constant, 0.0)


def power(low: Lowering, node: Node) -> Placed:
    """Lower x to the power of 2 or 3 (the GELU of GPT-2) or 0.5."""
    exponent = constant_of(low, node.args[1])
    if exponent == 0.5:
        return activated(low, node, ("sqrt", 0.0, 0.0))
    if exponent not in (2, 3):
        raise low.refuse(node, "only the powers 0.5, 2 and 3")
    first = low.arranged(node, node.args[0])
    value = low.builder.plain("mul", [first.value, first.value])
    value = low.builder.plain("mul", [value, first.value]) if exponent == 3 else value
    return Placed(value, first.shape, first.index)


def addcmul(low: Lowering, node: Node) -> Placed:
    """Lower shift + scale * x, where only x depends on the input."""
    shift, a, b = (constant_of(low, operand) for operand in node.args)
    if shift is None or (a is None) == (b is None) or node.kwargs:
        raise low.refuse(node, "only of two constants and a tensor")
    source, scale = (node.args[2], a) if b is None else (node.args[1], b)
    return affine(low, node, source, scale, shift)


def joined(low: Lowering, node: Node, kind: str, a: Any, b: Any) -> Placed:
    """Return a result of two tensors, one of which may be spread over dimensions of the other."""
    if shape_of(a) != shape_of(node):
        if kind in ("sub", "div") or shape_of(b) != shape_of(node):
            raise low.refuse(node, f"tensors of shapes {list(shape_of(a)[1:])} and {list(shape_of(b)[1:])}")
        a, b = b, a
    same = shape_of(a) == shape_of(b)
    if kind in ("add", "mul") and same and not complete(low, a) and complete(low, b):
        a, b = b, a  # one that is all of a plan tensor says how
    first = low.arranged(node, a)
    second, spread = low.broadcast(node, b, first)
    if kind == "add" and not spread:
        value = low.builder.add(first.value, second)
    else:
        value = low.builder.plain(kind, [first.value, second])
    return Placed(value, first.shape, first.index)


def complete(low: Lowering, source: Any) -> bool:
    placed = low.values.get(source)
    return isinstance(placed, Placed) and (placed.index is None or is_complete(placed.index, placed.size))


def cast(low: Lowering, node: Node) -> Placed:
    """Lower _to_copy: whole numbers are floats already."""
    source: Any = node.args[0]
    if node.kwargs.get("dtype", torch.float32) is not torch.float32:
        raise low.refuse(node, f"a cast to {node.kwargs['dtype']}; only to torch.float32")
    return low.placed(node, source)


RULES: dict[str, Rule] = {
    "relu": activation(RELU),
    **{name: named(name) for name in ("silu", "hardswish", "sigmoid", "hardsigmoid", "tanh", "sqrt")},
    "gelu": gelu,
    "elu": elu,
    "hardtanh": hardtanh,
    "clamp": clamp,
    "leaky_relu": leaky_relu,
    "add": add,
    "sub": sub,
    "rsub": rsub,
    "mul": mul,
    "div": div,
    "addcmul": addcmul,
    "pow": power,
    "_to_copy": cast,
}
