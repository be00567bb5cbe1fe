"""Lower a torch module to the operators of a plan: the traced graph has ATen operators, each with a rule in rules/."""

from __future__ import annotations

import hashlib
import math
import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from dcil.errors import UserError
from dcil.runtime.build import Builder, Value
from dcil.runtime.forms import Placed, Shape, channels_first, chosen_channels, image_shape, is_in_order, one_item
from dcil.runtime.nodes import name_of, shape_of
from dcil.runtime.rules import RULES
from dcil.tracing import BATCH_SIZES, place_of, trace
from dcil_runtime import Network


def lower(model: nn.Module, example: Tensor) -> Network:
    """Return the network in evaluation as plan operators, norm layers folded, activations and additions fused."""
    if example.ndim not in (2, 4):
        raise UserError(f"the example input must have 4 dimensions (images) or 2 (vectors), got {example.ndim}")
    with torch.no_grad():
        return Lowering(trace(model, example, training=False, leaf=lambda module: False)).run()


class Lowering:
    """One pass over the graph: what depends on the input is placed in the plan, everything else is computed here."""

    def __init__(self, traced: fx.GraphModule) -> None:
        self.traced, self.nodes = traced, list(traced.graph.nodes)
        source = self.nodes[0]
        self.builder = Builder(shape_of(source)[1:])
        self.values: dict[Any, Placed | list[Placed]] = {source: self.plain(self.builder.input, shape_of(source))}
        self.copies: dict[tuple[Value, Shape, bytes], Value] = {}
        self.constants: dict[Any, Tensor] = {}

    def run(self) -> Network:
        for node in self.nodes:
            self.fold(node)
        self.refuse_unknown()
        for node in self.nodes:
            if self.computes(node):
                self.place(node)
        output = self.nodes[-1].args[0]
        if not isinstance(output, Node) or not isinstance(self.values.get(output), Placed):
            raise UserError("the network must return one tensor that depends on its input")
        return self.builder.finish(self.image(output, output), len(shape_of(output)))

    def place(self, node: Node) -> None:
        """Add what the plan needs for a node; a rule returns where its result, or each of several, lies."""
        found = RULES[name_of(node)](self, node)
        if isinstance(found, Value):
            found = self.plain(found, shape_of(node))
        self.values[node] = found
        for placed in found if isinstance(found, list) else [found]:
            self.builder.uses(placed.value, len(node.users))

    def plain(self, value: Value, shape: Shape) -> Placed:
        """Return a torch tensor of this shape that lies in order in ``value``."""
        return Placed(value, image_shape(shape) or (math.prod(shape[1:]), 1, 1))

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

    # -- operands ----------------------------------------------------------------------------------------------------

    def placed(self, node: Node, source: Any) -> Placed:
        """Return where an operand of ``node`` lies; it must depend on the input."""
        found = self.values.get(source) if isinstance(source, Node) else None
        if not isinstance(found, Placed):
            raise self.refuse(node, "an operand that does not depend on the network's input")
        return found

    def value(self, node: Node, place: int = 0) -> Value:
        """Return the operand at ``place`` as an image or a vector, its elements in order."""
        return self.image(node, node.args[place])

    def image(self, node: Node, source: Any) -> Value:
        placed, shape = self.placed(node, source), image_shape(shape_of(source))
        if shape is None:
            raise self.refuse(node, f"a tensor of shape {list(shape_of(source)[1:])}")
        if placed.index is None and placed.shape == shape:
            return placed.value
        return self.copied(node, source, placed.places(shape_of(source)), shape)

    def copied(self, node: Node, source: Node, index: Tensor, shape: Shape) -> Value:
        """Return a plan tensor of ``shape`` in the order of ``index``: the operand's own, or a copy that all share."""
        placed = self.placed(node, source)
        if placed.shape == shape and is_in_order(index):
            return placed.value
        key = placed.value, shape, hashlib.sha256(index.contiguous().numpy().tobytes()).digest()
        if key not in self.copies:
            self.copies[key] = self.copy(node, placed, index, shape)
        self.copies[key].uses += len(source.users)
        return self.copies[key]

    def copy(self, node: Node, placed: Placed, index: Tensor, shape: Shape) -> Value:
        item = one_item(index, math.prod(placed.shape))
        if item is None:
            raise self.refuse(node, "an operand that mixes the items of a batch")
        channels = chosen_channels(item.reshape(shape), placed.shape)
        if channels is not None:
            return self.builder.select([placed.value], channels.numpy())
        if shape == (math.prod(placed.shape), 1, 1) and is_in_order(item):
            return self.builder.plain("flatten", [placed.value])
        raise self.refuse(node, f"a reshape or permutation of {list(placed.shape)} to {list(shape)}")

    def in_order(self, source: Any, last: bool) -> Placed | None:
        """Return an operand [n, c, ...], or with ``last`` [n, ..., c], whose elements lie in order in the plan, with
        the same channels; None for others."""
        placed = self.values.get(source)
        if not isinstance(placed, Placed) or len(shape_of(source)) < 2:
            return None
        moved = channels_first(placed.places(shape_of(source)), last)
        return placed if moved.shape[1] == placed.shape[0] and is_in_order(moved) else None

    def arranged(self, node: Node, source: Any) -> tuple[Placed, bool]:
        """Return an operand whose elements lie in order, with the channels first or (True) last; a copy if need be."""
        for last in (False, True):
            found = self.in_order(source, last)
            if found is not None:
                return found, last
        return self.plain(self.image(node, source), shape_of(source)), False

    def channels_last(self, node: Node, source: Any) -> Placed:
        """Return an operand [n, ..., c] whose channels are the plan's, with everything between as pixels."""
        found = self.in_order(source, True)
        if found is not None:
            return found
        shape = shape_of(source)
        index = channels_first(self.placed(node, source).places(shape), True)
        plan = image_shape((shape[0], shape[-1], *shape[1:-1])) if shape[0] == BATCH_SIZES[0] else None
        plan = plan or (index.shape[1], 1, index.shape[2])
        order = torch.arange(index.numel()).reshape(index.shape).movedim(1, -1).reshape(shape)
        return Placed(self.copied(node, source, index, plan), plan, order)

    def broadcast(self, node: Node, source: Any, shape: Shape, last: bool) -> Value:
        """Return the second operand beside one of the plan's ``shape``: its like, or a number per channel, pixel or
        image."""
        placed = self.placed(node, source)
        index = channels_first(placed.places(shape_of(source)), last)
        if index.numel() > BATCH_SIZES[0] * math.prod(placed.shape) and bool((index == index[:, :, :1]).all()):
            index = index[:, :, :1]  # expanded over the pixels
        channels, pixels = index.shape[1:]
        if len(shape_of(source)) != len(shape_of(node)) or channels not in (1, shape[0]):
            raise self.refuse(node, f"tensors of shapes {list(shape_of(node)[1:])} and {list(shape_of(source)[1:])}")
        if pixels not in (1, shape[1] * shape[2]):
            raise self.refuse(node, f"a tensor of shape {list(shape_of(source)[1:])} spread along one side")
        return self.copied(node, source, index, (channels, *(shape[1:] if pixels > 1 else (1, 1))))

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

    def number(self, argument: Any) -> Any:
        """Return an argument at the traced batch size: numbers that depend on the batch are nodes."""
        if not isinstance(argument, Node):
            return argument
        if argument in self.constants:
            return self.constants[argument]
        if argument.target is torch.ops.aten.sym_size.int:
            return BATCH_SIZES[0]
        if argument.target is operator.mul:
            return math.prod(map(self.number, argument.args))
        raise self.refuse(argument, "its place depends on the network's input")
