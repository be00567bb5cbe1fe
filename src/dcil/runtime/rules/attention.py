"""Attention: two batched products with a softmax between them become one operator.

Between the first product and the softmax scores may be multiplied by numbers, and constants added to them (causal
masks, relative positions), in any shape; what they come to is found by running those operators on constants. A tensor
that depends on the input may be added too if it has one number per key (padding).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.fx import Node

from dcil.runtime.build import Value
from dcil.runtime.forms import Placed
from dcil.runtime.nodes import depends_on_batch, name_of, shape_of
from dcil.runtime.rules import weighted
from dcil.runtime.rules.moves import MOVES
from dcil.runtime.rules.rule import Rule
from dcil.tracing import BATCH_SIZES

if TYPE_CHECKING:
    from dcil.runtime.lower import Lowering

SOFTMAX = ("_softmax", "_safe_softmax")
#: Scores to which more is added are gone: their slope cannot be seen.
MOST_ADDED = 1e3
FREE = frozenset(MOVES.split())


@dataclass
class Attention:
    """Two products: ``trunk`` are the nodes from the first (excluded) to the softmax (excluded); ``extra`` is the
    operand of ``extra_of`` that depends on the input; ``scale`` multiplies queries and keys."""

    first: Node
    trunk: list[Node] = field(default_factory=list)
    extra: Node | None = None
    extra_of: Node | None = None
    scale: float = 1.0


def attentions(low: Lowering) -> tuple[dict[Node, Attention], set[Node]]:
    """Return the attentions by their last product, and the nodes inside them; scaled queries lie where they did."""
    found: dict[Node, Attention] = {}
    inside: set[Node] = set()
    for node in low.nodes:
        if node.op != "call_function" or name_of(node) not in SOFTMAX or node in low.constants:
            continue
        last, after = _last_product(node)
        match = Attention(node) if last is not None else None
        if match is None or last is None or not _climb(low, match, node.args[0]):
            continue
        for operand in match.first.args[:2]:
            low.scaled |= _unscaled(low, match, operand)
        found[last] = match
        inside |= {match.first, node, *match.trunk, *after}
    return found, inside


def _last_product(softmax: Node) -> tuple[Node | None, list[Node]]:
    """Return the product that weighs the values, and the moves before it."""
    node = softmax
    moves: list[Node] = []
    dim = softmax.args[1]
    if dim not in (-1, len(shape_of(softmax)) - 1):
        return None, []
    while len(node.users) == 1:
        node = next(iter(node.users))
        if name_of(node) == "bmm":
            return (node if node.args[0] in (softmax, *moves) else None), moves
        if name_of(node) not in FREE:
            break
        moves.append(node)
    return None, []


def _climb(low: Lowering, match: Attention, node: Any) -> bool:
    """Follow the scores up to the first product."""
    if not isinstance(node, Node) or len(node.users) != 1 or depends_on_batch(node):
        return False
    if name_of(node) == "bmm":
        match.first = node
        return True
    sources = [n for n in node.all_input_nodes if n not in low.constants and "shape" in n.meta]
    for source in sources:
        others = [n for n in sources if n is not source]
        if len(others) > 1 or (others and (name_of(node) != "add" or match.extra is not None)):
            return False
        before = match.extra, match.extra_of
        if others:
            match.extra, match.extra_of = others[0], node
        if _climb(low, match, source):
            match.trunk.append(node)
            return True
        match.extra, match.extra_of = before
    return False


def _unscaled(low: Lowering, match: Attention, operand: Any) -> set[Node]:
    """Return the products with numbers among the moves of queries or keys; their factors go into the scale."""
    found: set[Node] = set()
    while isinstance(operand, Node) and operand.op == "call_function" and len(operand.users) == 1:
        if name_of(operand) in ("mul", "div") and _is_number(low, operand.args[1]):
            factor = float(low.constants.get(operand.args[1], operand.args[1]))  # type: ignore[arg-type]
            match.scale *= factor if name_of(operand) == "mul" else 1 / factor
            found.add(operand)
        elif name_of(operand) not in FREE:
            break
        operand = operand.args[0]
    return found


def _is_number(low: Lowering, operand: Any) -> bool:
    constant = low.constants.get(operand) if isinstance(operand, Node) else operand
    return isinstance(constant, (int, float)) or (isinstance(constant, Tensor) and constant.numel() == 1)


# -- lowering ----------------------------------------------------------------------------------------------------------


def product(low: Lowering, node: Node) -> Placed:
    """Lower the last product of an attention."""
    match = low.attentions.get(node)
    matrix = low.constants.get(node.args[1])
    if match is None and matrix is not None and bool((matrix == matrix[:1]).all()):
        return weighted.product(low, node, node.args[0], matrix[0].t(), None)
    if match is None:
        raise low.refuse(node, "a product of two tensors that depend on the input, outside attention")
    operands: list[Any] = [match.first.args[0], match.first.args[1], node.args[1]]
    placed = [low.placed(node, operand) for operand in operands]
    views = [p.places(shape_of(operand)) for p, operand in zip(placed, operands, strict=True)]
    views[1] = views[1].mT
    heads = _heads(low, node, views, placed)
    scale, table = _added(low, node, match, heads)
    values = list(dict.fromkeys(p.value for p in placed))
    channels = _numbered(heads, placed, values)
    inputs = [*values, _mask(low, node, match, heads)] if match.extra is not None else values
    value = low.builder.attention(inputs, channels, heads.shape, scale, heads.tokens, table, match.extra is not None)
    return Placed(value, (heads.count * heads.width, *placed[0].shape[1:]), heads.result())


@dataclass
class Heads:
    """The groups of a batched product: window ``window[g]`` and head ``head[g]`` of item ``item[g]``."""

    tokens: Tensor  # [windows, tokens]: pixels
    channels: list[Tensor]  # of queries, keys and values: [heads, channels]
    item: Tensor
    window: Tensor
    head: Tensor
    pixels: int

    @property
    def count(self) -> int:
        return len(self.channels[0])

    @property
    def width(self) -> int:
        return self.channels[2].shape[1]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, channels of a query, channels of a value."""
        return self.count, self.channels[0].shape[1], self.width

    def result(self) -> Tensor:
        """Return the index of the last product, [groups, tokens, channels]."""
        channel = self.head[:, None] * self.width + torch.arange(self.width)
        pixel = self.tokens[self.window]
        size = self.count * self.width * self.pixels
        return self.item[:, None, None] * size + channel[:, None, :] * self.pixels + pixel[:, :, None]

    def sorted(self, each: Tensor) -> Tensor:
        """Return what belongs to each group as [windows, heads, ...] of the first item, checked to be that of all."""
        windows = len(self.tokens)
        order = torch.argsort((self.item * windows + self.window) * self.count + self.head)
        return each[order].reshape(-1, windows, self.count, *each.shape[1:])


def _heads(low: Lowering, node: Node, views: list[Tensor], placed: list[Placed]) -> Heads:
    """Return how the groups of queries, keys and values are windows and heads of the items."""
    parts = [_split(low, node, view, p) for view, p in zip(views, placed, strict=True)]
    (where, *others), pixels = [where for where, _ in parts], placed[0].shape[1] * placed[0].shape[2]
    if any(not torch.equal(other, where) for other in others) or len({p.shape[1:] for p in placed}) != 1:
        raise low.refuse(node, "queries, keys and values of different tokens")
    item = where[:, 0] // pixels
    if not bool((where // pixels == item[:, None]).all()):
        raise low.refuse(node, "an operand that mixes the items of a batch")
    tokens, window = torch.unique(where % pixels, dim=0, return_inverse=True)
    channels, head = torch.unique(torch.cat([rows for _, rows in parts], 1), dim=0, return_inverse=True)
    number = (item * len(tokens) + window) * len(channels) + head
    complete = tokens.numel() == pixels and len(torch.unique(tokens)) == pixels
    groups = torch.arange(BATCH_SIZES[0] * len(tokens) * len(channels))
    if not complete or not torch.equal(number.sort().values, groups):
        raise low.refuse(node, "tokens that are not all pixels, each in one window and every head")
    return Heads(tokens, list(channels.split([rows.shape[1] for _, rows in parts], 1)), item, window, head, pixels)


def _split(low: Lowering, node: Node, view: Tensor, placed: Placed) -> tuple[Tensor, Tensor]:
    """Return the pixels [groups, tokens], counted through the items, and the channels [groups, channels] of an index
    [groups, tokens, channels]."""
    pixels = placed.shape[1] * placed.shape[2]
    channels = view % placed.size // pixels
    where = view - channels * pixels
    apart = bool((channels == channels[:, :1]).all() and (where == where[:, :, :1]).all())
    if not apart or bool((view < 0).any()):
        raise low.refuse(node, "queries, keys or values that are not channels of tokens")
    return where[:, :, 0] // placed.size * pixels + where[:, :, 0] % placed.size, channels[:, 0]


def _added(low: Lowering, node: Node, match: Attention, heads: Heads) -> tuple[float, Tensor | None]:
    """Return the factor of the scores, and what is added to them: [windows or 1, heads or 1, key, query]."""
    shape = shape_of(match.first)
    zero, one = (_run(low, match, torch.full(shape, number)).reshape(shape) for number in (0.0, 1.0))
    slope = (one - zero)[zero.abs() < MOST_ADDED]
    if not slope.numel() or float((slope - slope[0]).abs().max()) > 1e-6 * float(slope[0].abs()) or match.scale < 0:
        raise low.refuse(node, "scores that are more than multiplied by a number and added to")
    added = heads.sorted(zero)
    if not bool((added == added[:1]).all()):
        raise low.refuse(node, "scores that are not the same for every item")
    table = added[0].mT
    for dim in (0, 1):
        if bool((table == table.narrow(dim, 0, 1)).all()):
            table = table.narrow(dim, 0, 1)
    return match.scale * float(slope.double().mean()), None if bool((table == 0).all()) else table


def _run(low: Lowering, match: Attention, scores: Tensor, extra: float = 0.0) -> Tensor:
    """Run the operators between the products on constants."""
    known: dict[Any, Any] = {match.first: scores}
    if match.extra is not None:
        known[match.extra] = torch.full(shape_of(match.extra), extra)
    take: Callable[[Node], Any] = lambda n: known[n] if n in known else low.number(n)  # noqa: E731
    for node in match.trunk:
        known[node] = node.target(*fx.map_arg(node.args, take), **fx.map_arg(node.kwargs, take))  # type: ignore[operator]
    return known[match.trunk[-1]] if match.trunk else scores


def _mask(low: Lowering, node: Node, match: Attention, heads: Heads) -> Value:
    """Return the vector that is added to the scores of every key."""
    extra, source = match.extra, match.extra_of
    assert extra is not None and source is not None
    after = match.trunk[match.trunk.index(source) + 1 :]
    placed = low.placed(node, extra)
    if source.kwargs or any(name_of(n) not in FREE for n in after) or len(heads.tokens) > 1:
        raise low.refuse(node, "a mask that is more than added to the scores of all tokens")
    index = placed.places(shape_of(extra)).expand(shape_of(source))
    known: dict[Any, Any] = {source: index}
    take: Callable[[Node], Any] = lambda n: known[n] if n in known else low.number(n)  # noqa: E731
    for n in after:
        known[n] = index = n.target(*fx.map_arg(n.args, take), **fx.map_arg(n.kwargs, take))  # type: ignore[operator]
    each = heads.sorted(index.reshape(shape_of(match.first)))[:, 0]
    if not bool((each == each[:, :1, :1]).all()):
        raise low.refuse(node, "a mask that depends on the input must have one number per key")
    keys = torch.empty_like(each[:, 0, 0])
    keys[:] = each[:, 0, 0]
    return low.copied(node, extra, keys, (keys.shape[1], 1, 1))


def _numbered(heads: Heads, placed: list[Placed], values: list[Value]) -> Any:
    """Return the channels of queries, keys and values of all heads, counted through the plan tensors."""
    sizes = {p.value: p.shape[0] for p in placed}
    first = dict(zip(values, np.cumsum([0, *(sizes[value] for value in values)]), strict=False))
    return np.concatenate([c.numpy().ravel() + first[p.value] for c, p in zip(heads.channels, placed, strict=True)])


RULES: dict[str, Rule] = {"bmm": product}
