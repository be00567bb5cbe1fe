"""Pooling windows and reductions over the pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.fx import Node

from dcil.runtime.build import Value
from dcil.runtime.nodes import argument, pair, shape_of
from dcil.runtime.rules.rule import Rule

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
        raise low.refuse(node, f"{height} x {width} does not divide into {rows} x {columns}")
    size = (height // rows, width // columns)
    return low.builder.plain("avgpool", [low.value(node)], (*size, *size, 0, 0, 0, 0, 1, 1))


def mean(low: Lowering, node: Node) -> Value:
    dims: Any = argument(node, 1, None) or []
    if len(shape_of(node.args[0])) != 4 or sorted(d % 4 for d in dims) != [2, 3]:
        raise low.refuse(node, "only the mean over height and width")
    return low.builder.plain("mean", [low.value(node)])


RULES: dict[str, Rule] = {
    "max_pool2d_with_indices": max_pool,
    "avg_pool2d": avg_pool,
    "_adaptive_avg_pool2d": adaptive_pool,
    "mean": mean,
}
