"""Load and run plans: ``plan = load("net.dcil"); y = plan(x)``."""

from __future__ import annotations

import ctypes
import math
import os
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dcil_runtime.format import MAX_MEMORY, Network, PlanError, content, decode, encode
from dcil_runtime.native import Handle, instruction_set, options

#: Multiply-adds for one image: twice those of VGG-16 at 224 x 224, unpruned.
MAX_WORK = 1 << 35


class Plan:
    """Run a network on this CPU. Calls from several threads run concurrently, each with its own buffers.

    ``network`` is a Network, or the bytes of a plan file. ``threads`` share a call's images, or at batch 1 the layers,
    where measuring says that this helps. The first call of each batch size class (1, 2-3, 4-7, 8 and more) lays the
    network out in up to five ways and tunes every layer, for about ``tune_seconds`` each; ``prepare`` does that
    beforehand. ``isa`` forces kernels: avx512, avx2, portable; the environment's DCIL_ISA does the same.

    A plan that asks for more than ``max_memory`` bytes (weights, tables and the buffers of one call; concurrent calls
    have buffers of their own) or more than ``max_work`` multiply-adds for one image raises PlanError before anything of
    that size is allocated; None lifts the limit. Larger groups of images are tried as far as ``max_memory`` goes.

    A plan works on in a forked child, with threads of its own and to the same bits. A fork waits for tuning under way.
    """

    def __init__(
        self,
        network: Network | bytes,
        threads: int = 1,
        isa: str = "",
        tune_seconds: float = 1.5,
        max_memory: float | None = MAX_MEMORY,
        max_work: float | None = MAX_WORK,
    ) -> None:
        isa = isa or os.environ.get("DCIL_ISA", "")
        found = instruction_set(isa)
        if found is None:
            raise ValueError(f"this CPU does not run {isa!r}; it runs {instruction_set()!r} and 'portable'")
        if threads < 1:
            raise ValueError(f"threads must be >= 1, got {threads}")
        self.isa, self.threads = found, threads
        self.max_memory = _limit("max_memory", max_memory)
        chosen = options(isa, threads, tune_seconds, self.max_memory, _limit("max_work", max_work))
        self._native = Handle(encode(network) if isinstance(network, Network) else network, chosen)
        self.inputs, self.output_shapes = self._native.inputs(), [shape for shape, _ in self._native.outputs()]
        self.input_shape, self.output_shape = self.inputs[0][0], self.output_shapes[0]

    def __call__(self, *inputs: ArrayLike) -> Any:
        """Return the network's output for a batch: [n, c, h, w] images, [n, c] vectors or whatever ``inputs`` says.

        A network with several inputs takes them one after the other; one with several outputs returns a tuple.
        """
        if len(inputs) != len(self.inputs):
            raise ValueError(f"this network takes {len(self.inputs)} inputs, got {len(inputs)}")
        arrays = [self._checked(x, *port) for x, port in zip(inputs, self.inputs, strict=True)]
        count = len(arrays[0])
        if any(len(x) != count for x in arrays):
            raise ValueError(f"inputs must have the same number of items, got {', '.join(str(len(x)) for x in arrays)}")
        output_bytes = 4 * count * sum(map(math.prod, self.output_shapes))
        if output_bytes > self.max_memory:
            raise PlanError(
                f"the output of {count} images takes {output_bytes} bytes, more than the limit of "
                f"{self.max_memory:.0f} (give fewer images, or raise max_memory)"
            )
        out = tuple(np.empty((count, *shape), np.float32) for shape in self.output_shapes)
        if count:
            self._native.run([_address(x) for x in arrays], count, [_address(y) for y in out])
        return out[0] if len(out) == 1 else out

    def _checked(self, given: ArrayLike, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """Return an input as the native module reads it."""
        x = np.asarray(given)
        if dtype == "int64" and x.size and not (np.issubdtype(x.dtype, np.integer) or x.dtype == np.bool_):
            raise ValueError(f"this network reads whole numbers here, got {x.dtype}")
        if x.shape[1:] != shape or x.ndim != len(shape) + 1:
            what = "images" if dtype == "float32" else "numbers"
            raise ValueError(f"{what} of shape {x.shape}, but this network takes (n, {str(shape)[1:-1]})")
        return np.ascontiguousarray(x, dtype=dtype)

    def prepare(self, batch: int) -> None:
        """Lay out and tune for this batch size now."""
        if batch < 1:
            raise ValueError(f"batch must be >= 1, got {batch}")
        self._native.prepare(batch)

    def steps(self, batch: int = 1) -> list[dict[str, Any]]:
        """Return the steps that a batch of this size takes: shapes, kernel, and the time for one group of images."""
        found: list[dict[str, Any]] = self._native.describe(batch)["steps"]
        return found

    def describe(self, batch: int = 1) -> str:
        """Return a line per step: its shapes, the kernel that tuning chose, and its time for one group of images."""
        found = self._native.describe(batch)
        shared = "share" if found["layers_shared"] else "do not share"
        return "".join(f"{_line(step)}\n" for step in found["steps"]) + f"threads {shared} the layers of a group\n"

    def info(self) -> dict[str, Any]:
        """Return what is in the plan: version, bytes, inputs, outputs, notes, and the operators with their shapes."""
        return self._native.info()

    @property
    def notes(self) -> dict[str, str]:
        """Return what the writer noted, such as the run."""
        found: dict[str, str] = self.info()["notes"]
        return found

    @property
    def memory(self) -> int:
        """Return the bytes held now: weights, tables and the buffers of all concurrent calls."""
        return self._native.memory()


def _line(step: dict[str, Any]) -> str:
    shapes = (" x ".join(f"{n:3d}" for n in step[side]) for side in ("input", "output"))
    tile, took = " x ".join(map(str, step["tile"])), step["nanoseconds"] / 1000
    speed = 2 * step["macs"] / max(step["nanoseconds"], 1)
    chosen = f"  {step['kernel']}  {speed:.1f} GFLOP/s" if step["kernel"] else ""
    return f"{step['work']:8s} {' -> '.join(shapes)} ({tile})  {took:8.1f} us{chosen}"


def _address(array: NDArray[Any]) -> int:
    """Return the address of a contiguous array; array.ctypes.data takes microseconds, as long as a whole layer."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    except TypeError:  # read-only
        return int(array.ctypes.data)


def _limit(name: str, value: float | None) -> float:
    if value is None:
        return math.inf
    if not value > 0:
        raise ValueError(f"{name} must be > 0, got {value} (None: no limit)")
    return float(value)


def load(
    file: str | os.PathLike[str],
    threads: int = 1,
    isa: str = "",
    tune_seconds: float = 1.5,
    max_memory: float | None = MAX_MEMORY,
    max_work: float | None = MAX_WORK,
) -> Plan:
    """Load and check a plan file; raise PlanError if it is damaged or asks for more than the limits allow."""
    try:
        raw = content(file, _limit("max_memory", max_memory))
        return Plan(raw, threads, isa, tune_seconds, max_memory, max_work)
    except PlanError as error:
        raise PlanError(f"{file} is not a usable plan: {error}") from None


def read(file: str | os.PathLike[str], max_memory: float | None = MAX_MEMORY) -> Network:
    """Return the network in a plan file; raise PlanError if it is damaged or asks for more than ``max_memory``."""
    limit = _limit("max_memory", max_memory)
    try:
        raw = content(file, limit)
        Handle(raw, options(max_memory=limit))
    except PlanError as error:
        raise PlanError(f"{file} is not a usable plan: {error}") from None
    return decode(raw)
