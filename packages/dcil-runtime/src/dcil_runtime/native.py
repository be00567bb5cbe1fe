"""Call the native module's C interface (native/api.h) through ctypes: one build serves every Python."""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path
from typing import Any

import numpy as np

from dcil_runtime.format import ACTIVATIONS, KINDS, Activation, Network, Op, PlanError

LIBRARY = Path(__file__).with_name("_native.so")
ABI = 2
ERROR_SIZE = 256


class NativeMissing(RuntimeError):
    """Raised where the native module was not built, for example for lack of a compiler."""


class OpStruct(ctypes.Structure):
    """Mirror dcil_op of native/api.h, field by field."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "groups", "count_pad", "residual", "twin", "act", "twin_act")),
        ("window", ctypes.c_int32 * 10),
        ("input_count", ctypes.c_int32),
        ("channels", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("act_a", "act_b", "twin_a", "twin_b")),
        ("kept", ctypes.c_int64),
        ("inputs", ctypes.c_void_p),
        *(
            (name, ctypes.c_void_p)
            for name in ("index", "weight", "bias", "scale", "shift", "twin_scale", "twin_shift")
        ),
    ]


@functools.cache
def library(path: Path = LIBRARY) -> Any:
    if not path.exists():
        raise NativeMissing(
            f"the native module {path} is missing: install a C++17 compiler (Debian: apt install g++) and reinstall "
            "dcil-runtime, or in a checkout run: make native"
        )
    lib = ctypes.CDLL(str(path))
    pointer, integer, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "dcil_abi": (integer, []),
        "dcil_isa": (text, [text]),
        "dcil_graph": (pointer, [integer, integer, integer, ctypes.c_double, ctypes.c_double, text]),
        "dcil_graph_free": (None, [pointer]),
        "dcil_claim": (integer, [pointer, ctypes.c_double, text]),
        "dcil_add": (integer, [pointer, ctypes.POINTER(OpStruct), text]),
        "dcil_shape": (None, [pointer, integer, pointer]),
        "dcil_engine": (pointer, [pointer, text, integer, ctypes.c_double, text]),
        "dcil_engine_free": (None, [pointer]),
        "dcil_prepare": (integer, [pointer, integer, text]),
        "dcil_run": (integer, [pointer, pointer, integer, pointer, text]),
        "dcil_describe": (integer, [pointer, integer, text, integer, text]),
        "dcil_memory": (ctypes.c_int64, [pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    if lib.dcil_abi() != ABI:
        raise NativeMissing(f"{path} was built for another version: run make native, or reinstall dcil-runtime")
    return lib


def instruction_set(wanted: str = "") -> str | None:
    """Return the kernels that this CPU runs: avx512, avx2 or portable; None if it cannot run the wanted ones."""
    name: bytes | None = library().dcil_isa(wanted.encode())
    return name.decode() if name else None


_Message = ctypes.c_char * ERROR_SIZE


def message() -> Any:
    return _Message()


def text_of(error: Any) -> str:
    text: str = error.value.decode(errors="replace")
    return text


class Graph:
    """Build the network inside the native module, which checks every operator against the shapes before it."""

    def __init__(self, network: Network, max_memory: float = math.inf, max_work: float = math.inf) -> None:
        self.lib = library()
        error = message()
        self.handle = self.lib.dcil_graph(*network.input, max_memory, max_work, error)
        if not self.handle:
            raise PlanError(text_of(error))
        if self.lib.dcil_claim(self.handle, sum(map(_bytes, network.ops)), error) != 0:
            raise PlanError(text_of(error))
        self.output = 0
        for number, op in enumerate(network.ops):
            self.output = self.add(op, number)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.lib.dcil_graph_free(self.handle)

    def add(self, op: Op, number: int) -> int:
        struct, alive = _struct(op)
        error = message()
        tensor: int = self.lib.dcil_add(self.handle, ctypes.byref(struct), error)
        del alive  # the native side has copied everything
        if tensor < 0:
            raise PlanError(f"operator {number} ({op.kind}): {text_of(error)}")
        return tensor

    def shape(self, tensor: int) -> tuple[int, int, int]:
        found = (ctypes.c_int32 * 3)()
        self.lib.dcil_shape(self.handle, tensor, found)
        return found[0], found[1], found[2]


def _bytes(op: Op) -> float:
    """Return what the operator takes in the native module: weights with their positions, as if none were zero."""
    weights = op.arrays["weight"].size if "weight" in op.arrays else 0
    vectors = [array.size for name, array in op.arrays.items() if name not in ("index", "weight")]
    starts = 8 * (max(vectors, default=0) + 1)
    return 500 + 8 * weights + 4 * sum(vectors) + starts + 4 * len(op.inputs)


def _struct(op: Op) -> tuple[OpStruct, list[Any]]:
    """Return the operator as a C struct, and the arrays that it points into."""
    kinds = {name: np.uint32 if name == "index" else np.float32 for name in op.arrays}
    arrays = {name: np.require(array, kinds[name], ["C", "A"]) for name, array in op.arrays.items()}
    _same_length(arrays)
    inputs = np.array(op.inputs, np.int32)
    lengths = [array.size for name, array in arrays.items() if name not in ("index", "weight")]
    struct = OpStruct(
        kind=KINDS.index(op.kind),
        groups=op.groups,
        count_pad=op.count_pad,
        residual=op.residual,
        twin=0 if op.twin else -1,
        window=(ctypes.c_int32 * 10)(*op.window),
        input_count=len(inputs),
        channels=lengths[0] if lengths else 0,
        kept=arrays["weight"].size if "weight" in arrays else 0,
        inputs=inputs.ctypes.data,
        **_act("act", "act", op.act),
        **_act("twin_act", "twin", op.twin_act),
        **{name: array.ctypes.data for name, array in arrays.items()},
    )
    return struct, [inputs, arrays]


def _same_length(arrays: dict[str, Any]) -> None:
    """Check that vectors have one entry per output channel, and weights one per position."""
    if len({a.size for name, a in arrays.items() if name not in ("index", "weight")}) > 1:
        raise PlanError("an operator's vectors differ in length")
    if "index" in arrays and ("weight" not in arrays or arrays["index"].size != arrays["weight"].size):
        raise PlanError("weights and their positions differ in number")


def _act(field: str, prefix: str, act: Activation) -> dict[str, Any]:
    return {field: ACTIVATIONS.index(act[0]), f"{prefix}_a": act[1], f"{prefix}_b": act[2]}
