"""Write plan files: a network as a list of operators and its kept weights; the native module reads and checks them.

    magic "DCILPLAN" · version · 0 · length of META · length of DATA · SHA-256 of META and DATA · META · DATA

META is JSON: the input's shape (or lists of inputs, tensors 0, 1, ..., and outputs) and the operators, each naming
tensors by number (0 is the input; every operator's output, and its twin if it has one, takes the next number) and
arrays as [offset, count] into DATA. No sizes are stored that could contradict each other: the reader derives every
shape and checks every position against it. The checksum finds damage; the checks are what keeps a hostile file out.
Little-endian throughout.

Version 2 adds quantized tensors (u8, real = scale * (q - zero)) and int8 weights with a scale per output channel; a
network without them is written as version 1. docs/formats.md states the arithmetic.

There is one reader, native/plan_file.h: ``load`` and ``Plan`` run what it accepts, ``read`` takes it apart.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: The newest version; a file has the first one whose readers know all that is in it.
MAGIC, VERSION = b"DCILPLAN", 2
FIRST_KINDS = ("conv", "maxpool", "avgpool", "map", "concat", "mean", "flatten", "linear")
FIRST_ACTIVATIONS = ("none", "clamp", "leaky", "silu", "hardswish")
HEADER = struct.Struct("<8sIIQQ32s")
#: Bytes, unless the caller says otherwise.
MAX_MEMORY = 4 << 30
ARRAYS = {
    "index": "<u4",
    "tokens": "<u4",
    "table": "<f4",
    **dict.fromkeys(("weight", "weight_scale", "bias", "scale", "shift", "twin_scale", "twin_shift"), "<f4"),
}
#: Scale and zero point (0 to 255) of a tensor stored as u8: real = scale * (q - zero point).
Quant = tuple[float, int]
#: An activation and its two numbers; clamp's are its ends, leaky's and elu's the first. Besides FIRST_ACTIVATIONS:
#: sigmoid, hardsigmoid, tanh, gelu, gelu_tanh, elu, sqrt.
Activation = tuple[str, float, float]
NO_ACTIVATION: Activation = ("none", 0.0, 0.0)
RELU: Activation = ("clamp", 0.0, math.inf)


class PlanError(ValueError):
    """Raised for a file that is damaged or not a plan."""


@dataclass
class Op:
    """Describe one operator; fields that its kind does not use keep their defaults.

    ``kind`` is one of FIRST_KINDS, add, sub, mul, div, layernorm, groupnorm, select, take, constant, embedding, rows,
    columns or attention; docs/formats.md says what each does. ``window`` is kernel, stride,
    padding and dilation: kh kw sy sx top left bottom right dy dx. With ``quant`` the output is stored as u8
    (``twin_quant``: the twin). The array ``weight`` is int8 where there is a ``weight_scale``: real weight =
    weight * weight_scale[output]. ``number`` is what norms add to a variance, or
    what attention multiplies scores by. ``shape`` is the output's, where it does not follow from the inputs'.
    """

    kind: str
    inputs: tuple[int, ...]
    window: tuple[int, ...] = (1, 1, 1, 1, 0, 0, 0, 0, 1, 1)
    groups: int = 1
    count_pad: int = 0
    residual: int = -1
    act: Activation = NO_ACTIVATION
    twin: int = 0
    twin_act: Activation = NO_ACTIVATION
    quant: Quant | None = None
    twin_quant: Quant | None = None
    number: float = 0.0
    shape: tuple[int, int, int] | None = None
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)


@dataclass
class Input:
    """Describe an input without the batch: [c], [c, w] or [c, h, w]; ``int64`` holds tokens and is a vector."""

    shape: tuple[int, ...]
    type: str = "float32"


@dataclass
class Output:
    """Describe an output: the tensor in which its elements lie, and its shape without the batch."""

    tensor: int
    shape: tuple[int, ...]


@dataclass
class Network:
    """Hold the content of a plan file. Ranks: 4 for images, 2 for vectors.

    ``inputs`` and ``outputs``, given together, are instead of ``input`` and the ranks: several, integers, other ranks.
    """

    input: tuple[int, int, int]
    ops: list[Op]
    input_rank: int = 4
    output_rank: int = 4
    notes: dict[str, str] = field(default_factory=dict)
    inputs: list[Input] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)


def write(network: Network, file: str | Path) -> None:
    """Write the plan; weights that are mostly zeros are stored as positions and values."""
    Path(file).write_bytes(encode(network))


def encode(network: Network) -> bytes:
    """Return the bytes of the plan file."""
    blobs: list[bytes] = []
    ops = [_op_to_json(op, blobs) for op in network.ops]
    meta = {**_ports_to_json(network), "notes": network.notes, "ops": ops}
    text = json.dumps(meta, allow_nan=False, separators=(",", ":")).encode()
    data = b"".join(blobs)
    digest = hashlib.sha256(text + data).digest()
    version = max(map(_version, network.ops), default=1)
    version = max(version, 2) if network.outputs else version
    return HEADER.pack(MAGIC, version, 0, len(text), len(data), digest) + text + data


def content(file: str | os.PathLike[str], most: float) -> bytes:
    """Return the bytes of a regular file; opening a pipe would wait for its writer, reading a device never end."""
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise PlanError("it is not a regular file")
        if found.st_size > most:
            raise PlanError(
                f"it has {found.st_size} bytes, more than the limit of {most:.0f} (raise max_memory to allow it)"
            )
        with open(descriptor, "rb", closefd=False) as stream:
            return stream.read(found.st_size)
    finally:
        os.close(descriptor)


def decode(raw: bytes) -> Network:
    """Return the network in the bytes of a plan file that the native reader has accepted: nothing is checked here."""
    meta_size = HEADER.unpack_from(raw)[3]
    data = HEADER.size + meta_size
    meta = json.loads(raw[HEADER.size : data])
    ops = [_op_from_json(entry, memoryview(raw)[data:]) for entry in meta["ops"]]
    if "inputs" in meta:
        inputs = [Input(tuple(entry["shape"]), entry["type"]) for entry in meta["inputs"]]
        outputs = [Output(entry["tensor"], tuple(entry["shape"])) for entry in meta["outputs"]]
        return Network(plan_shape(inputs[0].shape), ops, notes=meta["notes"], inputs=inputs, outputs=outputs)
    channels, height, width = meta["input"]
    input_rank, output_rank = meta["ranks"]
    return Network((channels, height, width), ops, input_rank, output_rank, meta["notes"])


def plan_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the channels, height and width of an input [c], [c, w] or [c, h, w]."""
    return shape[0], shape[1] if len(shape) == 3 else 1, 1 if len(shape) == 1 else shape[-1]


def _ports_to_json(network: Network) -> dict[str, Any]:
    if network.outputs:
        inputs = [{"shape": port.shape, "type": port.type} for port in network.inputs]
        return {"inputs": inputs, "outputs": [{"tensor": p.tensor, "shape": p.shape} for p in network.outputs]}
    return {"input": network.input, "ranks": [network.input_rank, network.output_rank]}


def _version(op: Op) -> int:
    """Return the oldest version of the format that has what this operator uses."""
    first = op.kind in FIRST_KINDS and {op.act[0], op.twin_act[0]} <= set(FIRST_ACTIVATIONS) and not op.number
    first = first and op.shape is None
    return 1 if first and not (op.quant or op.twin_quant or "weight_scale" in op.arrays) else 2


def _dtype(name: str, arrays: Mapping[str, Any]) -> str:
    return "<i1" if name == "weight" and "weight_scale" in arrays else ARRAYS[name]


def _op_to_json(op: Op, blobs: list[bytes]) -> dict[str, Any]:
    arrays = dict(op.arrays)
    if "weight" in arrays and "index" not in arrays:
        flat = np.ascontiguousarray(arrays["weight"]).reshape(-1)
        kept = np.flatnonzero(flat)
        if 2 * kept.size <= flat.size:
            arrays |= {"index": kept, "weight": flat[kept]}
    places: dict[str, list[int]] = {}
    offset = sum(map(len, blobs))
    for name, array in arrays.items():
        blob = np.ascontiguousarray(array, dtype=_dtype(name, arrays)).tobytes()
        blob += bytes(-len(blob) % 4)
        places[name] = [offset, array.size]
        blobs.append(blob)
        offset += len(blob)
    return {
        "kind": op.kind,
        "inputs": op.inputs,
        "window": op.window,
        "groups": op.groups,
        "count_pad": op.count_pad,
        "residual": op.residual,
        "act": _act_to_json(op.act),
        "twin": op.twin,
        "twin_act": _act_to_json(op.twin_act),
        **{name: [float(quant[0]), int(quant[1])] for name, quant in _quants(op).items()},
        **({"number": float(op.number)} if op.number else {}),
        **({"shape": op.shape} if op.shape else {}),
        "arrays": places,
    }


def _quants(op: Op) -> dict[str, Quant]:
    return {name: quant for name, quant in (("quant", op.quant), ("twin_quant", op.twin_quant)) if quant is not None}


def _op_from_json(entry: dict[str, Any], data: memoryview) -> Op:
    places = entry["arrays"]
    arrays = {
        name: np.frombuffer(data, _dtype(name, places), count, offset) for name, (offset, count) in places.items()
    }
    acts = {name: _act_from_json(*entry[name]) for name in ("act", "twin_act")}
    tuples: dict[str, Any] = {
        name: tuple(entry[name]) for name in ("inputs", "window", "quant", "twin_quant", "shape") if name in entry
    }
    return Op(**{**entry, **acts, **tuples, "arrays": arrays})


def _act_to_json(act: Activation) -> list[Any]:
    return [act[0], *(None if math.isinf(number) else float(number) for number in act[1:])]


def _act_from_json(name: str, a: float | None, b: float | None) -> Activation:
    return name, -math.inf if a is None else a, math.inf if b is None else b
