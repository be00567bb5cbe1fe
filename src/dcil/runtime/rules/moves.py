"""Operators that move elements without computing, and concatenation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.fx import Node

from dcil.runtime.build import Value
from dcil.runtime.forms import Placed, chosen_channels, image_shape, is_in_order, one_item, tokens_of
from dcil.runtime.nodes import argument, depends_on_batch, name_of, shape_of
from dcil.runtime.operands import NOTHING
from dcil.runtime.rules.rule import Rule
from dcil.tracing import BATCH_SIZES

if TYPE_CHECKING:
    from dcil.runtime.lower import Lowering

aten = torch.ops.aten


def moved(low: Lowering, node: Node) -> Placed | list[Placed]:
    """Run the operator on the places of its operand's elements."""
    if depends_on_batch(node):
        raise low.refuse(node, "a place or a size that depends on the size of the batch")
    source = node.args[0]
    placed = low.placed(node, source)
    rest, named = fx.map_arg(node.args[1:], low.number), fx.map_arg(node.kwargs, low.number)
    found: Any = node.target(placed.places(shape_of(source)), *rest, **named)  # type: ignore[operator]
    return _placed(placed, found) if isinstance(found, Tensor) else [_placed(placed, part) for part in found]


def _placed(before: Placed, index: Tensor) -> Placed:
    whole = index.numel() == BATCH_SIZES[0] * math.prod(before.shape) and is_in_order(index)
    return Placed(before.value, before.shape, None if whole else index)


def pad(low: Lowering, node: Node) -> Placed:
    """Zeros have no place; a convolution takes them as its own padding."""
    if argument(node, 2, 0) != 0:
        raise low.refuse(node, "only zeros")
    placed = low.placed(node, node.args[0])
    index = aten.constant_pad_nd.default(placed.places(shape_of(node.args[0])), node.args[1], -1)
    return Placed(placed.value, placed.shape, index)


def one_result(low: Lowering, node: Node) -> Placed:
    found, which = low.values.get(node.args[0]), node.args[1]
    if isinstance(found, list):
        return found[which]  # type: ignore[index]
    if which != 0:
        raise low.refuse(node, f"only the first result of {name_of(node.args[0])}")  # type: ignore[arg-type]
    return low.placed(node, node.args[0])


def cat(low: Lowering, node: Node) -> Value | Placed:
    """Concatenate channels; those that were chosen before are taken from where they lie."""
    parts: Any = node.args[0]
    rank = len(shape_of(node))
    if argument(node, 1, 0) % rank != 1 or rank not in (2, 4):
        return joined(low, node, parts, argument(node, 1, 0) % rank)
    found = [channels_of(low, node, part) for part in parts]
    values = list(dict.fromkeys(value for value, _, _ in found))
    sizes = {value: size for value, size, _ in found}
    if all(len(chosen) == size and (chosen == np.arange(size)).all() for _, size, chosen in found):
        return low.builder.plain("concat", [value for value, _, _ in found])
    first = dict(zip(values, np.cumsum([0, *(sizes[value] for value in values)]), strict=False))
    return low.builder.select(values, np.concatenate([first[value] + chosen for value, _, chosen in found]))


def joined(low: Lowering, node: Node, parts: list[Any], dim: int) -> Placed:
    """Concatenate along any other dimension, tokens with their channels first."""
    placed = [low.placed(node, part) for part in parts]
    values = {p.value: p.size for p in placed}
    first = dict(zip(values, np.cumsum([0, *values.values()]).tolist(), strict=False))
    items = []
    for part, p in zip(parts, placed, strict=True):
        item = one_item(p.places(shape_of(part)), p.size)
        if dim == 0 or item is None:
            raise low.refuse(node, "an operand that mixes the items of a batch")
        items.append(torch.where(item < 0, NOTHING, item + first[p.value]).reshape(shape_of(part)[1:]))
    index = torch.cat(items, dim - 1)
    shape, sources = shape_of(node), list(values)
    tokens = len(shape) == 3 or any(_is_last(p) for p in placed)
    if not tokens:
        plan = image_shape(shape) or (index.numel(), 1, 1)
        return Placed(low.builder.take(sources, index.numpy(), plan), plan)
    moved = index.reshape(-1, shape[-1]).t().contiguous()
    plan = (shape[-1], *(shape[1:3] if len(shape) == 4 else (1, moved.shape[1])))
    order = torch.arange(BATCH_SIZES[0] * index.numel()).reshape(BATCH_SIZES[0], *moved.shape).transpose(1, 2)
    return Placed(low.builder.take(sources, moved.numpy(), plan), plan, order.reshape(shape))


def _is_last(placed: Placed) -> bool:
    """Return whether the last dimension is the channels of tokens."""
    return placed.index is not None and tokens_of(placed.index, placed.shape) is not None


def as_strided(low: Lowering, node: Node) -> Placed:
    """Lower the strides that pooling gives a tensor of one pixel."""
    source: Any = node.args[0]
    shape = shape_of(node)
    strides: Any = node.args[2]
    contiguous = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    other = [d for d in range(1, len(shape)) if shape[d] > 1 and strides[d] != contiguous[d]]
    if shape_of(source) != shape or other:
        raise low.refuse(node, "only a tensor in its own order")
    return low.placed(node, source)


def channels_of(low: Lowering, node: Node, source: Any) -> tuple[Value, int, Any]:
    """Return the plan tensor in which an operand's channels lie, its number of channels, and which they are."""
    placed = low.placed(node, source)
    shape = shape_of(source)
    if placed.index is not None and len(shape) == 4:
        item = one_item(placed.index, math.prod(placed.shape))
        channels = None if item is None else chosen_channels(item.reshape(shape[1:]), placed.shape)
        if channels is not None:
            return placed.value, placed.shape[0], channels.numpy()
    return low.image(node, source), shape[1], np.arange(shape[1])


MOVES = "view reshape flatten unflatten squeeze unsqueeze permute transpose t movedim slice select narrow split "
MOVES += "split_with_sizes unbind chunk expand roll flip pixel_shuffle pixel_unshuffle channel_shuffle detach alias"
RULES: dict[str, Rule] = {
    **dict.fromkeys(MOVES.split(), moved),
    "constant_pad_nd": pad,
    "cat": cat,
    "as_strided": as_strided,
    "getitem": one_result,
}
