"""Layers with weights: convolutions, matrix products, batch norms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from dcil.runtime.build import Array, Value
from dcil.runtime.forms import Placed, is_complete, is_in_order, tokens_of
from dcil.runtime.nodes import pair, shape_of
from dcil.runtime.rules.moves import channels_of
from dcil.runtime.rules.rule import Rule

if TYPE_CHECKING:
    from dcil.runtime.lower import Lowering

aten = torch.ops.aten
#: Of a convolution whose channels are chosen through its weights.
MOST_WEIGHTS = 1 << 24


def conv(low: Lowering, node: Node) -> Value:
    weight = low.tensor(node, 1)
    if weight.ndim != 4 or node.args[6]:
        raise low.refuse(node, "only a two-dimensional convolution, not transposed")
    stride, pad, dilation = (pair(node.args[place]) for place in (3, 4, 5))
    source, (left, right, top, bottom) = _without_zeros(node.args[0])
    sides = (pad[0] + top, pad[1] + left, pad[0] + bottom, pad[1] + right)
    window = (weight.shape[2], weight.shape[3], *stride, *sides, *dilation)
    bias = low.constant(node, 2, weight.shape[0], 0.0)
    groups: Any = node.args[8]
    value, weight, groups = _from_chosen(low, node, source, weight, groups)
    if groups == 1 and shape_of(node)[2:] == shape_of(node.args[0])[2:] == weight.shape[2:] == (1, 1):
        return low.builder.layer("linear", value, weight.flatten(1).float().numpy(), bias)
    return low.builder.layer("conv", value, weight.float().numpy(), bias, window, groups)


def _without_zeros(source: Any) -> tuple[Any, Any]:
    """Return what zeros were padded to, and how many (left, right, top, bottom); uneven padding="same" does that."""
    padded = source.target is aten.constant_pad_nd.default and len(source.args[1]) == 4 and min(source.args[1]) >= 0
    return (source.args[0], source.args[1]) if padded else (source, (0, 0, 0, 0))


def _from_chosen(low: Lowering, node: Node, source: Any, weight: Tensor, groups: int) -> tuple[Value, Tensor, int]:
    """Return the operand, and the weights that read it: for channels chosen or reordered before, weights over all
    channels, zeros for the others, so that nothing is moved."""
    value, channels, chosen = channels_of(low, node, source)
    outputs, width = weight.shape[:2]
    fits = outputs * channels * weight[0, 0].numel() <= MOST_WEIGHTS
    if np.array_equal(chosen, np.arange(channels)):
        return value, weight, groups
    if not fits:
        return low.image(node, source), weight, groups
    wide = weight.new_zeros(outputs, channels, *weight.shape[2:])
    for o in range(outputs):
        first = o // (outputs // groups) * width
        wide[o].index_add_(0, torch.from_numpy(chosen[first : first + width]), weight[o])
    return value, wide, 1


def linear(low: Lowering, node: Node) -> Placed:
    """Lower addmm(bias, x, weight') or mm(x, weight'): a 1 x 1 convolution over tokens, in whatever order they lie."""
    first = len(node.args) - 2
    if node.kwargs:
        raise low.refuse(node, f"only without {', '.join(node.kwargs)}")
    weight = low.tensor(node, first + 1).t()
    return product(low, node, node.args[first], weight, low.constant(node, 0, len(weight), 0.0) if first else None)


def product(low: Lowering, node: Node, source: Any, weight: Tensor, bias: Array | None) -> Placed:
    """Return weight * x + bias for the last dimension of x."""
    bias = np.zeros(len(weight)) if bias is None else bias
    placed = low.placed(node, source)
    tokens = tokens_of(placed.places(shape_of(source)), placed.shape)
    pixels = placed.shape[1] * placed.shape[2]
    if tokens is None or not is_complete(tokens.pixels, pixels):
        placed = low.channels_last(node, source)
        tokens, pixels = tokens_of(placed.places(shape_of(source)), placed.shape), placed.shape[1] * placed.shape[2]
        assert tokens is not None
    if not is_in_order(tokens.channels) or len(tokens.channels) != placed.shape[0]:
        weight = weight.new_zeros(len(weight), placed.shape[0]).index_add_(1, tokens.channels, weight)
    if pixels == 1:
        value = low.builder.layer("linear", placed.value, weight.float().numpy(), bias)
    else:
        value = low.builder.layer("conv", placed.value, weight.float().numpy()[:, :, None, None], bias)
    return Placed(value, (len(weight), *placed.shape[1:]), tokens.index(len(weight), pixels))


def batch_norm(low: Lowering, node: Node) -> Value:
    if node.args[3] is None or node.args[5]:
        raise low.refuse(node, "it uses the batch's own statistics")
    mean, var = low.constant(node, 3, 0, 0.0), low.constant(node, 4, 0, 1.0)
    scale = low.constant(node, 1, mean.size, 1.0) / np.sqrt(var + float(node.args[7]))  # type: ignore[arg-type]
    shift = low.constant(node, 2, mean.size, 0.0) - mean * scale
    return low.builder.affine(low.value(node), scale, shift)


RULES: dict[str, Rule] = {
    "convolution": conv,
    "addmm": linear,
    "mm": linear,
    "native_batch_norm": batch_norm,
}
