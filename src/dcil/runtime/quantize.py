"""Quantize a plan after training: tensors to u8, weights to int8 with a scale per output channel.

A weight w of output channel o becomes round(w / s_o), s_o = max |w| / 127: symmetric, so that zeros stay zeros. A
tensor x becomes round(x / s) + z (ranges.py).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from dcil.errors import UserError
from dcil.runtime.ranges import Floats, observed, quant_for
from dcil_runtime import Network, Op
from dcil_runtime.format import Quant

#: Operators with weights, which compute with int8.
LAYERS = ("conv", "linear")
#: Operators whose output stays u8 where all that they read is u8.
FOLLOWERS = ("map", "maxpool", "concat")
#: 32-bit sums hold so many products of u8 and int8.
MOST_WEIGHTS = 65536


def layers_of(network: Network) -> list[int]:
    """Return the operators that can compute with int8, by place."""
    return [k for k, op in enumerate(network.ops) if op.kind in LAYERS and _row(op) <= MOST_WEIGHTS]


def _row(op: Op) -> int:
    """Return how many weights an output channel has."""
    return int(op.arrays["weight"].size) // max(1, len(op.arrays["bias"]))


def outputs_of(network: Network) -> list[list[int]]:
    """Return the tensors that each operator makes."""
    made, count = [], 1
    for op in network.ops:
        made.append(list(range(count, count + 1 + op.twin)))
        count += 1 + op.twin
    return made


def quantized_tensors(network: Network, layers: Collection[int]) -> set[int]:
    """Return the tensors that are u8 where ``layers`` compute with int8."""
    made, found = outputs_of(network), set[int]()
    for k in layers:
        op = network.ops[k]
        found.add(op.inputs[0])
        if op.kind == "conv":
            found |= {*made[k], *([op.residual] if op.residual >= 0 else [])}
    for k, op in enumerate(network.ops[:-1]):
        if op.kind in FOLLOWERS and all(i in found for i in op.inputs):
            found.add(made[k][0])
    return found


def calibrated(network: Network, images: Floats) -> dict[int, Quant]:
    """Return the scale and zero point of every tensor that may become u8."""
    if network.outputs:  # several inputs or outputs, tokens: the tensors are numbered otherwise
        raise UserError("int8 needs one input of images and one output: export this network in fp32")
    samples = observed(network, images, sorted(quantized_tensors(network, layers_of(network))))
    return {tensor: quant_for(sample) for tensor, sample in samples.items()}


def quantized(network: Network, quants: Mapping[int, Quant], layers: Collection[int]) -> Network:
    """Return the network with these layers in int8; the input becomes u8 by a map of its own."""
    tensors, made = quantized_tensors(network, layers), outputs_of(network)
    chosen = {tensor: quants[tensor] for tensor in tensors}
    for k, op in enumerate(network.ops):
        if op.kind == "maxpool" and {op.inputs[0], made[k][0]} <= tensors:
            chosen[made[k][0]] = chosen[op.inputs[0]]  # bytes are compared as they are
    shift = int(0 in tensors)
    ops = [Op("map", (0,), quant=chosen[0])] if shift else []
    for k, op in enumerate(network.ops):
        as_bytes = k in layers or op.kind in FOLLOWERS

        def place(tensor: int, first: int = shift if as_bytes else 0) -> int:
            return tensor + shift if tensor > 0 else first if tensor == 0 else tensor

        new = replace(
            copy.copy(op),
            inputs=tuple(place(i) for i in op.inputs),
            residual=place(op.residual, shift),
            quant=chosen.get(made[k][0]),
            twin_quant=chosen.get(made[k][-1]) if op.twin else None,
        )
        ops.append(with_int8(new) if k in layers else new)
    if made[-1][0] in tensors:  # a network's output is fp32
        ops.append(Op("map", (made[-1][0] + shift,)))
    return replace(network, ops=ops)


def with_int8(op: Op) -> Op:
    """Return a layer with int8 weights, one scale for each output channel."""
    weight = np.asarray(op.arrays["weight"], np.float32)
    rows = weight.reshape(len(op.arrays["bias"]), -1)
    scale = (np.abs(rows).max(1) / 127).astype(np.float32)
    scale[scale < 1e-20] = 1
    whole = np.clip(np.rint(rows / scale[:, None]), -127, 127).astype(np.int8)
    return replace(op, arrays={**op.arrays, "weight": whole.reshape(weight.shape), "weight_scale": scale})
