"""What the operators of tokens mean, in double precision: attention, embeddings, constants, moves, resizing."""

from __future__ import annotations

import math
from collections.abc import Callable

import definition
import numpy as np
from definition import Array, dense
from numpy.typing import NDArray

from dcil_runtime import Network, Op
from dcil_runtime.format import Activation, plan_shape


def run(network: Network, inputs: list[NDArray]) -> list[Array]:
    """Return the outputs of a network with lists of inputs and outputs."""
    shapes = [plan_shape(port.shape) for port in network.inputs]
    tensors = [x.astype(np.float64).reshape(len(x), *shape) for x, shape in zip(inputs, shapes, strict=True)]
    for op in network.ops:
        out = OPERATORS[op.kind](op, [tensors[i] for i in op.inputs])
        out = np.broadcast_to(out, (len(inputs[0]), *out.shape[1:]))
        tensors.append(activated(out + tensors[op.residual] if op.residual >= 0 else out, op.act))
    return [tensors[port.tensor].reshape(-1, *port.shape) for port in network.outputs]


def activated(x: Array, act: Activation) -> Array:
    if act[0] == "gelu":
        return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
    return definition.activated(x, act)


def attention(op: Op, inputs: list[Array]) -> Array:
    """softmax(number * queries . keys + added) values, for every head of every window."""
    heads, (depth, width) = op.groups, op.window[:2]
    parts = inputs[: len(inputs) - op.count_pad]
    x = np.concatenate(parts, 1).reshape(len(parts[0]), -1, math.prod(parts[0].shape[2:]))
    x = x[:, op.arrays["index"]]
    if "tokens" in op.arrays:
        x = x[:, :, op.arrays["tokens"]]
    windows, length = (1, x.shape[2]) if op.shape is None else (x.shape[2] // op.shape[2], op.shape[2])
    x = x.reshape(len(x), -1, windows, length)
    split = [x[:, : heads * depth], x[:, heads * depth : 2 * heads * depth], x[:, 2 * heads * depth :]]
    q, k, v = (part.reshape(len(x), heads, -1, windows, length) for part in split)
    scores = op.number * np.einsum("nhdwi,nhdwj->nwhij", q, k)
    if "table" in op.arrays:
        scores = scores + op.arrays["table"].reshape(*op.shape[:2], length, length).swapaxes(2, 3)
    if op.count_pad:
        scores = scores + inputs[-1].reshape(len(x), 1, 1, 1, length)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("nwhij,nhdwj->nhdwi", weights, v).reshape(len(x), heads * width, -1)
    if "tokens" in op.arrays:
        placed = np.empty_like(out)
        placed[:, :, op.arrays["tokens"]] = out
        out = placed
    return out.reshape(len(x), -1, *parts[0].shape[2:])


def take(op: Op, inputs: list[Array]) -> Array:
    flat = np.concatenate([x.reshape(len(x), -1) for x in inputs], 1)
    index = op.arrays["index"].astype(np.int64)
    nothing = index == 0xFFFFFFFF
    return np.where(nothing, 0, flat[:, np.where(nothing, 0, index)]).reshape(len(flat), *op.shape)


def embedding(op: Op, inputs: list[Array]) -> Array:
    rows = op.arrays["table"].reshape(-1, op.shape[0]).astype(np.float64)
    return rows[inputs[0][:, :, 0, 0].astype(np.int64)].swapaxes(1, 2)[:, :, None]


def layernorm(op: Op, inputs: list[Array]) -> Array:
    x = inputs[0]
    off = x - x.mean(1, keepdims=True)
    y = off / np.sqrt((off**2).mean(1, keepdims=True) + op.number)
    return definition.scaled(y, op.arrays["scale"], op.arrays["shift"])


def rows(op: Op, inputs: list[Array]) -> Array:
    return np.einsum("oi,nciw->ncow", dense(op, (op.shape[1], inputs[0].shape[2])), inputs[0])


def columns(op: Op, inputs: list[Array]) -> Array:
    return np.einsum("oi,nchi->ncho", dense(op, (op.shape[2], inputs[0].shape[3])), inputs[0])


OPERATORS: dict[str, Callable[[Op, list[Array]], Array]] = {
    **definition.OPERATORS,
    "attention": attention,
    "take": take,
    "constant": lambda op, inputs: op.arrays["table"].astype(np.float64).reshape(1, *op.shape),
    "embedding": embedding,
    "layernorm": layernorm,
    "rows": rows,
    "columns": columns,
    "add": lambda op, inputs: inputs[0] + inputs[1],
    "mul": lambda op, inputs: inputs[0] * inputs[1],
}
