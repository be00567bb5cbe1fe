"""Write and read plan files: a network as a list of operators and its kept weights, safe to read from anybody.

    magic "DCILPLAN" · version · 0 · length of META · length of DATA · SHA-256 of META and DATA · META · DATA

META is JSON: the input's shape and the operators, each naming tensors by number (0 is the input; every operator's
output, and its twin if it has one, takes the next number) and arrays as [offset, count] into DATA. No sizes are stored
that could contradict each other: the native module derives every shape and checks every position against it. The
checksum finds damage; the checks are what keeps a hostile file out. Little-endian throughout.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC, VERSION = b"DCILPLAN", 1
HEADER = struct.Struct("<8sIIQQ32s")
KINDS = ("conv", "maxpool", "avgpool", "map", "concat", "mean", "flatten", "linear")
ACTIVATIONS = ("none", "clamp", "leaky", "silu", "hardswish")
ARRAYS = {
    "index": "<u4",
    **dict.fromkeys(("weight", "bias", "scale", "shift", "twin_scale", "twin_shift"), "<f4"),
}
#: Bytes, unless the caller says otherwise.
MAX_MEMORY = 4 << 30
#: Bytes of META, far above what the operators allowed can take: as Python objects JSON takes tens of times its size.
MAX_META = 16 << 20
#: An activation and its two numbers; clamp's are its ends.
Activation = tuple[str, float, float]
NO_ACTIVATION: Activation = ("none", 0.0, 0.0)
RELU: Activation = ("clamp", 0.0, math.inf)


class PlanError(ValueError):
    """Raised for a file that is damaged or not a plan."""


@dataclass
class Op:
    """Describe one operator; fields that its kind does not use keep their defaults.

    ``window`` is kernel, stride, padding and dilation: kh kw sy sx top left bottom right dy dx.
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
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)


@dataclass
class Network:
    """Hold the content of a plan file. Ranks: 4 for images, 2 for vectors."""

    input: tuple[int, int, int]
    ops: list[Op]
    input_rank: int = 4
    output_rank: int = 4
    notes: dict[str, str] = field(default_factory=dict)


def write(network: Network, file: str | Path) -> None:
    """Write the plan; weights that are mostly zeros are stored as positions and values."""
    blobs: list[bytes] = []
    ops = [_op_to_json(op, blobs) for op in network.ops]
    meta = {
        "input": network.input,
        "ranks": [network.input_rank, network.output_rank],
        "notes": network.notes,
        "ops": ops,
    }
    text = json.dumps(meta, allow_nan=False, separators=(",", ":")).encode()
    data = b"".join(blobs)
    digest = hashlib.sha256(text + data).digest()
    Path(file).write_bytes(HEADER.pack(MAGIC, VERSION, 0, len(text), len(data), digest) + text + data)


def read(file: str | Path, max_memory: float | None = MAX_MEMORY) -> Network:
    """Read and check a plan file; raise PlanError if it is damaged or larger than ``max_memory``."""
    try:
        return _parse(_content(file, math.inf if max_memory is None else max_memory))
    except PlanError as error:
        raise PlanError(f"{file} is not a usable plan: {error}") from None
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise PlanError(f"{file} is not a usable plan: {type(error).__name__}: {str(error)[:100]}") from None


def _content(file: str | Path, most: float) -> bytes:
    """Return the bytes of a regular file; opening a pipe would wait for its writer, reading a device never end."""
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        found = os.fstat(descriptor)
        _require(stat.S_ISREG(found.st_mode), "it is not a regular file")
        _require(
            found.st_size <= most,
            f"it has {found.st_size} bytes, more than the limit of {most:.0f} (raise max_memory to allow it)",
        )
        with open(descriptor, "rb", closefd=False) as stream:
            return stream.read(found.st_size)
    finally:
        os.close(descriptor)


def _op_to_json(op: Op, blobs: list[bytes]) -> dict[str, Any]:
    arrays = dict(op.arrays)
    if "weight" in arrays:
        flat = np.ascontiguousarray(arrays["weight"]).reshape(-1)
        kept = np.flatnonzero(flat)
        if 2 * kept.size <= flat.size:
            arrays |= {"index": kept, "weight": flat[kept]}
    places: dict[str, list[int]] = {}
    offset = sum(map(len, blobs))
    for name, array in arrays.items():
        blob = np.ascontiguousarray(array, dtype=ARRAYS[name]).tobytes()
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
        "arrays": places,
    }


def _act_to_json(act: Activation) -> list[Any]:
    return [act[0], *(None if math.isinf(number) else number for number in act[1:])]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(message)


def _parse(raw: bytes) -> Network:
    _require(len(raw) >= HEADER.size and raw[:8] == MAGIC, "it does not begin like one")
    _, version, zero, meta_size, data_size, digest = HEADER.unpack_from(raw)
    _require(version == VERSION and zero == 0, f"version {version} instead of {VERSION}")
    _require(HEADER.size + meta_size + data_size == len(raw), "it has been cut short or grown")
    _require(meta_size <= MAX_META, f"its description has {meta_size} bytes, more than {MAX_META}")
    body = memoryview(raw)[HEADER.size :]
    _require(hashlib.sha256(body).digest() == digest, "its checksum is wrong")
    meta = json.loads(str(body[:meta_size], "utf-8"), object_pairs_hook=_unique)
    data = body[meta_size:]
    _keys(meta, {"input", "ranks", "notes", "ops"})
    shape, ranks = _ints(meta["input"], 3, 1, 1 << 24), _ints(meta["ranks"], 2, 2, 4)
    _require(3 not in ranks and (ranks[0] == 4 or shape[1:] == (1, 1)), "the input's rank")
    notes = meta["notes"]
    _require(isinstance(notes, dict) and all(_is_text(v) for pair in notes.items() for v in pair), "its notes")
    _require(isinstance(meta["ops"], list), "its operators")
    ops = [_op_from_json(entry, data) for entry in meta["ops"]]
    return Network((shape[0], shape[1], shape[2]), ops, ranks[0], ranks[1], notes)


def _op_from_json(entry: Any, data: memoryview) -> Op:
    _keys(entry, set(Op.__dataclass_fields__))
    _require(entry["kind"] in KINDS, "an unknown operator")
    _require(isinstance(entry["inputs"], list) and 1 <= len(entry["inputs"]) <= 10_000, "an operator's inputs")
    _require(isinstance(entry["arrays"], dict) and set(entry["arrays"]) <= set(ARRAYS), "an unknown array")
    arrays = {name: _array(place, ARRAYS[name], data) for name, place in entry["arrays"].items()}
    whole: Callable[[str, int, int], int] = lambda name, low, high: _ints([entry[name]], 1, low, high)[0]  # noqa: E731
    return Op(
        kind=entry["kind"],
        inputs=_ints(entry["inputs"], len(entry["inputs"]), 0, 1 << 20),
        window=_ints(entry["window"], 10, 0, 4096),
        groups=whole("groups", 1, 1 << 24),
        count_pad=whole("count_pad", 0, 1),
        residual=whole("residual", -1, 1 << 20),
        act=_act_from_json(entry["act"]),
        twin=whole("twin", 0, 1),
        twin_act=_act_from_json(entry["twin_act"]),
        arrays=arrays,
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    _require(len(found) == len(pairs), "a field is there twice")
    return found


def _is_text(value: Any) -> bool:
    """Return whether it is a string that can be written: no half of a surrogate pair."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def _keys(entry: Any, wanted: set[str]) -> None:
    _require(isinstance(entry, dict) and set(entry) == wanted, "a field is missing or unknown")


def _ints(values: Any, count: int, low: int, high: int) -> tuple[int, ...]:
    _require(isinstance(values, list) and len(values) == count, "a list of another length")
    _require(all(type(v) is int and low <= v <= high for v in values), f"a number not from {low} to {high}")
    return tuple(values)


def _act_from_json(entry: Any) -> Activation:
    _require(isinstance(entry, list) and len(entry) == 3 and entry[0] in ACTIVATIONS, "an unknown activation")
    _require(all(v is None or (type(v) is float and abs(v) < 1e30) for v in entry[1:]), "an activation's numbers")
    name, a, b = entry
    return name, -math.inf if a is None else a, math.inf if b is None else b


def _array(place: Any, kind: str, data: memoryview) -> NDArray[Any]:
    offset, count = _ints(place, 2, 0, 1 << 40)
    _require(offset % 4 == 0 and offset + 4 * count <= len(data), "an array outside the file")
    return np.frombuffer(data, dtype=kind, count=count, offset=offset)
