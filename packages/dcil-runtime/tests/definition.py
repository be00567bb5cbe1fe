"""What the operators of plan files mean, in double precision and as slowly as they are written down."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dcil_runtime import Network, Op
from dcil_runtime.format import Activation

Array = NDArray[np.float64]


def run(network: Network, x: NDArray[np.float32]) -> Array:
    """Return the network's output for a batch, of its rank."""
    tensors: list[Array] = [x.astype(np.float64).reshape(len(x), *network.input)]
    for op in network.ops:
        out = OPERATORS[op.kind](op, [tensors[i] for i in op.inputs])
        if op.residual >= 0:
            out = out + tensors[op.residual]
        tensors.append(activated(out, op.act))
        if op.twin:
            twin = scaled(tensors[-1], op.arrays["twin_scale"], op.arrays["twin_shift"])
            tensors.append(activated(twin, op.twin_act))
    last = tensors[-2 if network.ops[-1].twin else -1]
    return last if network.output_rank == 4 else last.reshape(len(x), -1)


def activated(x: Array, act: Activation) -> Array:
    name, a, b = act
    match name:
        case "clamp":
            return np.clip(x, a, b)
        case "leaky":
            return np.where(x > 0, x, a * x)
        case "silu":
            return x / (1 + np.exp(-x))
        case "hardswish":
            return x * np.clip(x + 3, 0, 6) / 6
    return x


def scaled(x: Array, scale: Array, shift: Array) -> Array:
    """Return x times scale plus shift, by channel."""
    each = (1, -1, 1, 1)
    return x * scale.astype(np.float64).reshape(each) + shift.astype(np.float64).reshape(each)


def dense(op: Op, shape: tuple[int, ...]) -> Array:
    """Return the weights with their zeros."""
    weight, index = op.arrays["weight"].reshape(-1).astype(np.float64), op.arrays.get("index")
    if index is not None:
        kept, weight = weight, np.zeros(int(np.prod(shape)))
        weight[index] = kept
    return weight.reshape(shape)


def windows(op: Op, x: Array, fill: float) -> Iterator[tuple[int, int, Array]]:
    """Yield for each place of the window its row, its column, and the pixels that lie under it."""
    kh, kw, sy, sx, top, left, bottom, right, dy, dx = op.window
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=fill)
    size = zip(padded.shape[2:], (kh, kw), (sy, sx), (dy, dx), strict=True)
    height, width = ((n - (k - 1) * d - 1) // step + 1 for n, k, step, d in size)
    for ky, kx in itertools.product(range(kh), range(kw)):
        y, x0 = ky * dy, kx * dx
        yield ky, kx, padded[:, :, y : y + (height - 1) * sy + 1 : sy, x0 : x0 + (width - 1) * sx + 1 : sx]


def conv(op: Op, inputs: list[Array]) -> Array:
    (x,), bias = inputs, op.arrays["bias"].astype(np.float64)
    shape = (len(bias), x.shape[1] // op.groups, *op.window[:2])
    weight, out = dense(op, shape), None
    for ky, kx, pixels in windows(op, x, 0):
        groups = zip(np.split(weight[:, :, ky, kx], op.groups), np.split(pixels, op.groups, 1), strict=True)
        part = np.concatenate([np.einsum("oc,nchw->nohw", *group) for group in groups], 1)
        out = part if out is None else out + part
    return out + bias[:, None, None]


def maxpool(op: Op, inputs: list[Array]) -> Array:
    return np.max([pixels for _, _, pixels in windows(op, inputs[0], -np.inf)], 0)


def avgpool(op: Op, inputs: list[Array]) -> Array:
    """The sum divided by how many pixels lie under the window; with count_pad those of the nearer padding count too."""
    (x,), (top, left) = inputs, op.window[4:6]
    inside = np.ones((1, 1, *x.shape[2:]))
    if op.count_pad:
        inside = np.pad(inside, ((0, 0), (0, 0), (top, top), (left, left)), constant_values=1)
        bigger = Op("avgpool", (0,), (*op.window[:4], 0, 0, op.window[6] - top, op.window[7] - left, 1, 1))
        count = sum(pixels for _, _, pixels in windows(bigger, inside, 0))
    else:
        count = sum(pixels for _, _, pixels in windows(op, inside, 0))
    return sum(pixels for _, _, pixels in windows(op, x, 0)) / count


def mapped(op: Op, inputs: list[Array]) -> Array:
    x = scaled(inputs[0], op.arrays["scale"], op.arrays["shift"]) if "scale" in op.arrays else inputs[0]
    return x + inputs[1] if len(inputs) == 2 else x


def linear(op: Op, inputs: list[Array]) -> Array:
    x, bias = inputs[0].reshape(len(inputs[0]), -1), op.arrays["bias"].astype(np.float64)
    return (x @ dense(op, (len(bias), x.shape[1])).T + bias)[:, :, None, None]


OPERATORS = {
    "conv": conv,
    "maxpool": maxpool,
    "avgpool": avgpool,
    "map": mapped,
    "concat": lambda op, inputs: np.concatenate(inputs, 1),
    "mean": lambda op, inputs: inputs[0].mean((2, 3), keepdims=True),
    "flatten": lambda op, inputs: inputs[0].reshape(len(inputs[0]), -1, 1, 1),
    "linear": linear,
}
