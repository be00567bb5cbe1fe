"""Pooling windows, upsampling, and means over the pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from dcil.runtime.build import Value
from dcil.runtime.forms import Placed, is_complete, is_in_order, tokens_of
from dcil.runtime.nodes import argument, depends_on_batch, pair, shape_of
from dcil.runtime.rules.rule import Rule
from dcil.tracing import BATCH_SIZES

if TYPE_CHECKING:
    from dcil.runtime.lower import Lowering


def _pool_window(node: Node, dilation: tuple[int, int]) -> tuple[int, ...]:
    """Return the pooling window; rounding up becomes padding below and right, as the output's shape demands."""
    size, pad = pair(node.args[1]), pair(argument(node, 3, [0]))
    stride = pair(argument(node, 2, None) or size)
    ends = []
    for i in (0, 1):
        before, after = shape_of(node.args[0])[2 + i], shape_of(node)[2 + i]
        need = (after - 1) * stride[i] + dilation[i] * (size[i] - 1) + 1 - before - pad[i]
        ends.append(max(need, 0))
    return (*size, *stride, *pad, *ends, *dilation)


def max_pool(low: Lowering, node: Node) -> Value:
    dilation = pair(argument(node, 4, [1]))
    return low.builder.plain("maxpool", [low.value(node)], _pool_window(node, dilation))


def avg_pool(low: Lowering, node: Node) -> Value:
    if argument(node, 6, None) is not None:
        raise low.refuse(node, "divisor_override")
    count = int(bool(argument(node, 5, True)))
    return low.builder.plain("avgpool", [low.value(node)], _pool_window(node, (1, 1)), count)


def adaptive_pool(low: Lowering, node: Node) -> Value:
    (height, width), (rows, columns) = shape_of(node.args[0])[2:], shape_of(node)[2:]
    if height % rows or width % columns:
        return resize(low, node)
    size = (height // rows, width // columns)
    return low.builder.plain("avgpool", [low.value(node)], (*size, *size, 0, 0, 0, 0, 1, 1))


def resize(low: Lowering, node: Node) -> Value:
    """Lower an operator whose output pixels are weighted sums of pixels, by rows and by columns alike; what it makes of
    single rows and columns of ones are the weights."""
    if depends_on_batch(node):
        raise low.refuse(node, "a size that depends on the size of the batch")
    value, before, after = low.value(node), shape_of(node.args[0])[1:], shape_of(node)[1:]
    args, kwargs = fx.map_arg(node.args[1:], low.number), fx.map_arg(node.kwargs, low.number)
    for kind, side in (("rows", 1), ("columns", 2)):
        ones = torch.eye(before[side])[None, :, :, None] if side == 1 else torch.eye(before[side])[None, :, None, :]
        ones = ones.expand(1, -1, before[1], before[2]).contiguous()
        found: Tensor = node.target(ones, *args, **kwargs)  # type: ignore[operator]
        weight = found[0].select(3 - side, 0).t().contiguous()
        if not torch.equal(weight, torch.eye(before[side])[: len(weight)]) or after[side] != before[side]:
            shape = (before[0], after[1], before[2] if side == 1 else after[2])
            value = low.builder.resize(kind, value, weight.numpy(), shape)
    return value


def mean(low: Lowering, node: Node) -> Placed:
    """Lower the mean over all dimensions but the batch and one, which are the channels."""
    source: Any = node.args[0]
    shape = shape_of(source)
    dims: Any = argument(node, 1, None) or []
    kept = [d for d in range(1, len(shape)) if d not in {d % len(shape) for d in dims}]
    if len(kept) != 1 or shape[0] != BATCH_SIZES[0]:
        raise low.refuse(node, "only the mean over all dimensions but the batch and the channels")
    placed = low.placed(node, source)
    index = placed.places(shape).movedim(kept[0], -1)
    tokens = tokens_of(index, placed.shape)
    value = placed.value
    if tokens is None or not is_complete(index, placed.size) or not is_in_order(tokens.channels):
        moved = index.reshape(shape[0], -1, index.shape[-1]).movedim(-1, 1)
        value = low.copied(node, source, moved, (moved.shape[1], 1, moved.shape[2]))
    return Placed(low.builder.plain("mean", [value]), (index.shape[-1], 1, 1))


UPSAMPLE = ("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d")
RULES: dict[str, Rule] = {
    "max_pool2d_with_indices": max_pool,
    "avg_pool2d": avg_pool,
    "_adaptive_avg_pool2d": adaptive_pool,
    "mean": mean,
    **dict.fromkeys(UPSAMPLE, resize),
}
