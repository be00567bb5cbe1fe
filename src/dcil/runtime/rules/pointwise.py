"""Activations, and sums, products and quotients of two tensors or of a tensor and constants."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.fx import Node

from dcil.runtime.build import Array
from dcil.runtime.forms import Placed
from dcil.runtime.nodes import argument, shape_of
from dcil.runtime.rules.rule import Rule
from dcil.tracing import BATCH_SIZES
from dcil_runtime.format import RELU, Activation

if TYPE_CHECKING:
    from dcil.runtime.lower import Lowering


def activated(low: Lowering, node: Node, act: Activation) -> Placed:
    """Apply an activation to what the operand lies in, in whatever order that is."""
    source: Any = node.args[0]
    placed = low.placed(node, source)
    index = placed.index
    if index is not None and (index.numel() != BATCH_SIZES[0] * math.prod(placed.shape) or bool((index < 0).any())):
        return low.plain(low.builder.activate(low.image(node, source), act), shape_of(node))
    return Placed(low.builder.activate(placed.value, act), placed.shape, index)


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
    """Return scale * x + shift, with numbers or constant tensors of one number per channel."""
    placed, last = low.arranged(node, source)
    channels = placed.shape[0]
    vectors = [per_channel(low, node, constant, last, channels) for constant in (scale, shift)]
    return Placed(low.builder.affine(placed.value, *vectors), placed.shape, placed.index)


def per_channel(low: Lowering, node: Node, constant: Any, last: bool, channels: int) -> Array:
    if not isinstance(constant, Tensor):
        return np.full(channels, float(constant))
    full = constant.reshape((1,) * (len(shape_of(node)) - constant.ndim) + constant.shape)
    if full.ndim == 1:  # of one number
        return np.full(channels, float(full))
    full = full.movedim(-1, 1) if last else full
    if full.numel() not in (1, channels) or full.shape[1] != full.numel():
        raise low.refuse(node, f"a constant of shape {list(constant.shape)}; only one number per channel")
    return full.flatten().expand(channels).double().numpy()


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
    for source, other in ((a, b), (b, a)):
        constant = constant_of(low, other)
        if constant is not None:
            return affine(low, node, source, constant, 0.0)
    return joined(low, node, "mul", a, b)


def div(low: Lowering, node: Node) -> Placed:
    a, b = node.args
    constant = constant_of(low, b)
    if node.kwargs.get("rounding_mode") is not None or constant_of(low, a) is not None:
        raise low.refuse(node, "only a tensor over a tensor or a constant, not rounded")
    return joined(low, node, "div", a, b) if constant is None else affine(low, node, a, 1.0 / constant, 0.0)


def addcmul(low: Lowering, node: Node) -> Placed:
    """Lower shift + scale * x, where only x depends on the input."""
    shift, a, b = (constant_of(low, operand) for operand in node.args)
    if shift is None or (a is None) == (b is None) or node.kwargs:
        raise low.refuse(node, "only of two constants and a tensor")
    source, scale = (node.args[2], a) if b is None else (node.args[1], b)
    return affine(low, node, source, scale, shift)


def joined(low: Lowering, node: Node, kind: str, a: Any, b: Any) -> Placed:
    """Return a result of two tensors, one of which may have one number per channel, per pixel or per image."""
    if shape_of(a) != shape_of(node):
        if kind in ("sub", "div") or shape_of(b) != shape_of(node):
            raise low.refuse(node, f"tensors of shapes {list(shape_of(a)[1:])} and {list(shape_of(b)[1:])}")
        a, b = b, a
    turned = low.in_order(a, False) is None and low.in_order(a, True) is None
    if kind in ("add", "mul") and shape_of(a) == shape_of(b) and turned:
        a, b = b, a  # one that lies in order says how
    placed, last = low.arranged(node, a)
    second = low.broadcast(node, b, placed.shape, last)
    if kind == "add" and shape_of(a) == shape_of(b):
        value = low.builder.add(placed.value, second)
    else:
        value = low.builder.plain(kind, [placed.value, second])
    return Placed(value, placed.shape, placed.index)


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
}
