"""Call the native module's C interface (include/dcil_runtime.h) through ctypes: one build serves every Python."""

from __future__ import annotations

import ctypes
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dcil_runtime.format import PlanError

HERE = Path(__file__).parent
LIBRARY = HERE / "libdcil_runtime.so"
ABI = 3
ERROR_SIZE, MAX_RANK = 256, 8
NO_MEMORY = -2
#: Of elements, in the order of their numbers.
TYPES = ("float32", "int64")


class NativeMissing(RuntimeError):
    """Raised where the native module was not built, for example for lack of a compiler."""


class Options(ctypes.Structure):
    """Mirror dcil_options of include/dcil_runtime.h, field by field."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("isa", ctypes.c_char_p),
        ("threads", ctypes.c_int32),
        *((name, ctypes.c_double) for name in ("tune_seconds", "max_memory", "max_work")),
    ]


class Tensor(ctypes.Structure):
    """Mirror dcil_tensor."""

    _fields_ = [
        ("type", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.c_int64 * MAX_RANK),
        ("elements", ctypes.c_int64),
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
        "dcil_format": (integer, []),
        "dcil_isa": (text, [text]),
        "dcil_load": (integer, [text, pointer, pointer, text]),
        "dcil_load_bytes": (integer, [text, ctypes.c_size_t, pointer, pointer, text]),
        "dcil_free": (None, [pointer]),
        "dcil_inputs": (integer, [pointer]),
        "dcil_outputs": (integer, [pointer]),
        "dcil_input": (integer, [pointer, integer, pointer, text]),
        "dcil_output": (integer, [pointer, integer, pointer, text]),
        "dcil_run": (integer, [pointer, pointer, integer, pointer, text]),
        "dcil_prepare": (integer, [pointer, integer, text]),
        "dcil_memory": (ctypes.c_int64, [pointer]),
        "dcil_info": (integer, [pointer, pointer, text]),
        "dcil_describe": (integer, [pointer, integer, pointer, text]),
        "dcil_free_text": (None, [pointer]),
    }
    if lib.dcil_abi() != ABI:
        raise NativeMissing(f"{path} was built for another version: run make native, or reinstall dcil-runtime")
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def instruction_set(wanted: str = "") -> str | None:
    """Return the kernels that this CPU runs: avx512, avx2, neon or portable; None if it cannot run the wanted ones."""
    name: bytes | None = library().dcil_isa(wanted.encode())
    return name.decode() if name else None


def options(
    isa: str = "", threads: int = 1, tune_seconds: float = 0, max_memory: float = math.inf, max_work: float = math.inf
) -> Options:
    return Options(ctypes.sizeof(Options), isa.encode(), threads, tune_seconds, max_memory, max_work)


_Message = ctypes.c_char * ERROR_SIZE


class Handle:
    """Hold a dcil_plan, made from the bytes of a file: every method is the C function of its name."""

    def __init__(self, raw: bytes, chosen: Options) -> None:
        self.lib = library()
        found = ctypes.c_void_p()
        self.check(self.lib.dcil_load_bytes, raw, len(raw), ctypes.byref(chosen), ctypes.byref(found))
        self.plan = found

    def __del__(self) -> None:
        if getattr(self, "plan", None):
            self.lib.dcil_free(self.plan)

    def check(self, function: Any, *arguments: Any) -> None:
        """Call a function that can fail; raise what its code says."""
        error = _Message()
        code = function(*arguments, error)
        if code != 0:
            text = error.value.decode(errors="replace")
            raise MemoryError(text) if code == NO_MEMORY else PlanError(text)

    def inputs(self) -> list[tuple[tuple[int, ...], str]]:
        """Return the shapes of the inputs, without the batch, and the types of their elements."""
        return [self._port(self.lib.dcil_input, i) for i in range(self.lib.dcil_inputs(self.plan))]

    def outputs(self) -> list[tuple[tuple[int, ...], str]]:
        return [self._port(self.lib.dcil_output, i) for i in range(self.lib.dcil_outputs(self.plan))]

    def _port(self, function: Any, number: int) -> tuple[tuple[int, ...], str]:
        tensor = Tensor()
        self.check(function, self.plan, number, ctypes.byref(tensor))
        return tuple(tensor.shape[: tensor.rank]), TYPES[tensor.type]

    def run(self, inputs: Sequence[int], count: int, outputs: Sequence[int]) -> None:
        """Run the network on a batch; inputs and outputs are addresses."""
        pointers = (ctypes.c_void_p * len(inputs))(*inputs), (ctypes.c_void_p * len(outputs))(*outputs)
        self.check(self.lib.dcil_run, self.plan, pointers[0], count, pointers[1])

    def prepare(self, count: int) -> None:
        self.check(self.lib.dcil_prepare, self.plan, count)

    def memory(self) -> int:
        return int(self.lib.dcil_memory(self.plan))

    def info(self) -> dict[str, Any]:
        return self._json(self.lib.dcil_info, self.plan)

    def describe(self, count: int) -> dict[str, Any]:
        return self._json(self.lib.dcil_describe, self.plan, count)

    def _json(self, function: Any, *arguments: Any) -> dict[str, Any]:
        text = ctypes.c_char_p()
        self.check(function, *arguments, ctypes.byref(text))
        try:
            found: dict[str, Any] = json.loads(text.value or b"")
            return found
        finally:
            self.lib.dcil_free_text(text)
