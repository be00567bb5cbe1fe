"""Norm layers whose statistics depend on the image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.fx import Node

from dcil.runtime.build import Value
from dcil.runtime.forms import Placed
from dcil.runtime.nodes import shape_of
from dcil.runtime.rules.rule import Rule

if TYPE_CHECKING:
    from dcil.runtime.lower import Lowering


def layer_norm(low: Lowering, node: Node) -> Placed:
    """Normalise the channels of every pixel, wherever the network keeps them last."""
    source: Any = node.args[0]
    if len(node.args[1]) != 1:  # type: ignore[arg-type]
        raise low.refuse(node, "only over the last dimension")
    placed = low.channels_last(node, source)
    channels = shape_of(source)[-1]
    scale, shift = low.constant(node, 2, channels, 1.0), low.constant(node, 3, channels, 0.0)
    value = low.builder.norm("layernorm", placed.value, scale, shift, float(node.args[4]))  # type: ignore[arg-type]
    return Placed(value, placed.shape, placed.index)


def group_norm(low: Lowering, node: Node) -> Value:
    """Lower native_group_norm(x, weight, bias, n, c, pixels, groups, eps)."""
    channels, groups, eps = (node.args[place] for place in (4, 6, 7))
    assert isinstance(channels, int) and isinstance(groups, int)
    scale, shift = low.constant(node, 1, channels, 1.0), low.constant(node, 2, channels, 0.0)
    return low.builder.norm("groupnorm", low.value(node), scale, shift, float(eps), groups)  # type: ignore[arg-type]


RULES: dict[str, Rule] = {"native_layer_norm": layer_norm, "native_group_norm": group_norm}
