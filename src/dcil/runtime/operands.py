"""Bring operands into the order that an operator of a plan reads them in; copies are shared."""

from __future__ import annotations

import hashlib
import math
import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from dcil.errors import UserError
from dcil.runtime.build import Array, Builder, Value
from dcil.runtime.forms import (
    Placed,
    Shape,
    chosen_channels,
    image_shape,
    is_complete,
    is_in_order,
    one_item,
    tokens_of,
)
from dcil.runtime.nodes import name_of, shape_of
from dcil.tracing import BATCH_SIZES, place_of

#: In the index of a take: zero.
NOTHING = 0xFFFFFFFF


class Operands:
    """What is known of every node: where it lies in the plan, or its constant value."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.values: dict[Any, Placed | list[Placed]] = {}
        self.copies: dict[tuple[Value, Shape, bytes], Value] = {}
        self.constants: dict[Any, Tensor] = {}
        self.scaled: set[Node] = set()  # products with numbers that an attention takes into its scale

    def refuse(self, node: Node, why: str) -> UserError:
        return UserError(f"{name_of(node)} in {place_of(node)}: {why}")

    def plain(self, value: Value, shape: Shape) -> Placed:
        """Return a torch tensor of this shape that lies in order in ``value``."""
        return Placed(value, image_shape(shape) or (math.prod(shape[1:]), 1, 1))

    def placed(self, node: Node, source: Any) -> Placed:
        """Return where an operand of ``node`` lies; one that does not depend on the input becomes a constant."""
        found = self.values.get(source) if isinstance(source, Node) else None
        if found is None and isinstance(self.constants.get(source), Tensor):
            return self.placed_constant(node, source)
        if not isinstance(found, Placed):
            raise self.refuse(node, "an operand that does not depend on the network's input")
        return found

    def placed_constant(self, node: Node, source: Node) -> Placed:
        """Put a constant tensor [n, ...], the same for every item, into the plan: tokens with their channels first."""
        tensor = self.constants[source]
        if tensor.ndim < 2 or len(tensor) != BATCH_SIZES[0] or not bool((tensor == tensor[:1]).all()):
            raise self.refuse(node, f"a constant of shape {list(tensor.shape)} beside tensors with a batch")
        shape = image_shape(tuple(tensor.shape)) or (math.prod(tensor.shape[1:]), 1, 1)
        index = None
        if tensor.ndim == 3:
            shape = (tensor.shape[2], 1, tensor.shape[1])
            index = torch.arange(tensor.numel()).reshape(len(tensor), tensor.shape[2], -1).transpose(1, 2)
            tensor = tensor.transpose(1, 2)
        value = self.builder.constant(tensor[0].reshape(shape).float().numpy())
        self.values[source] = Placed(value, shape, index)
        self.builder.uses(value, len(source.users))
        return Placed(value, shape, index)

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
        item = one_item(index, placed.size)
        if item is None:
            raise self.refuse(node, "an operand that mixes the items of a batch")
        channels = chosen_channels(item.reshape(shape), placed.shape) if bool((item >= 0).all()) else None
        if channels is not None:
            return self.builder.select([placed.value], channels.numpy())
        if shape == (placed.size, 1, 1) and is_in_order(item):
            return self.builder.plain("flatten", [placed.value])
        return self.builder.take([placed.value], torch.where(item < 0, NOTHING, item).numpy(), shape)

    def arranged(self, node: Node, source: Any) -> Placed:
        """Return an operand that is all of a plan tensor, in any order; a copy if need be."""
        placed, shape = self.placed(node, source), shape_of(source)
        if placed.index is None or is_complete(placed.index, placed.size):
            return placed
        if len(shape) > 2 and tokens_of(placed.index, placed.shape) is not None:
            return self.channels_last(node, source)
        if image_shape(shape) is None:
            return self.plain(self.copied(node, source, placed.index, (math.prod(shape[1:]), 1, 1)), shape)
        return self.plain(self.image(node, source), shape)

    def channels_last(self, node: Node, source: Any) -> Placed:
        """Return an operand [..., c] whose channels are the plan's, each pixel once, in any order."""
        placed, shape = self.placed(node, source), shape_of(source)
        index = placed.places(shape)
        tokens = tokens_of(index, placed.shape)
        if tokens and is_complete(index, placed.size) and is_in_order(tokens.channels):
            return Placed(placed.value, placed.shape, index)
        if shape[0] % BATCH_SIZES[0]:
            raise self.refuse(node, "an operand that mixes the items of a batch")
        moved = index.reshape(BATCH_SIZES[0], -1, shape[-1]).movedim(-1, 1)
        plan = image_shape((shape[0], shape[-1], *shape[1:-1])) if shape[0] == BATCH_SIZES[0] else None
        plan = plan or (shape[-1], 1, moved.shape[2])
        order = torch.arange(index.numel()).reshape(moved.shape).movedim(1, -1).reshape(shape)
        return Placed(self.copied(node, source, moved, plan), plan, order)

    def beside(self, first: Placed, shape: Shape, index: Tensor) -> Tensor:
        """Return an index of the torch ``shape`` in the order of the plan tensor that ``first`` lies in, [n, c, pixels]
        with 1 for the channels or the pixels where all are equal."""
        full = torch.empty(BATCH_SIZES[0] * first.size, dtype=index.dtype)
        full[first.places(shape).flatten()] = index.expand(shape).flatten()
        full = full.reshape(BATCH_SIZES[0], first.shape[0], -1)
        if bool((full == full[:, :, :1]).all()):
            full = full[:, :, :1]
        return full[:, :1] if bool((full == full[:, :1]).all()) else full

    def broadcast(self, node: Node, source: Any, first: Placed) -> tuple[Value, bool]:
        """Return the second operand beside ``first``: its like, or (True) a number per channel, pixel or image."""
        index = self.beside(first, shape_of(node), self.placed(node, source).places(shape_of(source)))
        channels, pixels = index.shape[1:]
        shape = (channels, *(first.shape[1:] if pixels > 1 else (1, 1)))
        return self.copied(node, source, index, shape), shape != first.shape

    def constant_beside(self, node: Node, constant: Any, first: Placed) -> Array:
        """Return a number or constant tensor as [c, pixels] in the order of ``first``, 1 where all are equal."""
        if not isinstance(constant, Tensor):
            return np.full((1, 1), float(constant))
        found = self.beside(first, shape_of(node), constant.double())
        if not bool((found == found[:1]).all()):
            raise self.refuse(node, "a constant that differs between the items of a batch")
        return found[0].numpy()

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
