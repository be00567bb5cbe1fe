"""Load and run plans: ``plan = load("net.dcil"); y = plan(x)``."""

from __future__ import annotations

import ctypes
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dcil_runtime.format import MAX_MEMORY, Network, PlanError, read
from dcil_runtime.native import Graph, instruction_set, library, message, text_of

#: Multiply-adds for one image: twice those of VGG-16 at 224 x 224, unpruned.
MAX_WORK = 1 << 35


class Plan:
    """Run a network on this CPU. Calls from several threads run concurrently, each with its own buffers.

    ``threads`` share a call's images, or at batch 1 the layers, where measuring says that this helps. The first call
    of each batch size class (1, 2-3, 4-7, 8 and more) lays the network out in up to five ways and tunes every layer,
    for about ``tune_seconds`` each; ``prepare`` does that beforehand. ``isa`` forces kernels: avx512, avx2, portable;
    the environment's DCIL_ISA does the same.

    A plan that asks for more than ``max_memory`` bytes (weights, tables and the buffers of one call; concurrent calls
    have buffers of their own) or more than ``max_work`` multiply-adds for one image raises PlanError before anything of
    that size is allocated; None lifts the limit. Larger groups of images are tried as far as ``max_memory`` goes.

    A plan works on in a forked child, with threads of its own and to the same bits. A fork waits for tuning under way.
    """

    def __init__(
        self,
        network: Network,
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
        self._lib = library()
        self.max_memory = _limit("max_memory", max_memory)
        graph = Graph(network, self.max_memory, _limit("max_work", max_work))
        self.input_shape: tuple[int, ...] = network.input if network.input_rank == 4 else network.input[:1]
        out = graph.shape(graph.output)
        if network.output_rank == 2 and out[1:] != (1, 1):
            raise PlanError("the output is not a vector")
        self.output_shape: tuple[int, ...] = out if network.output_rank == 4 else out[:1]
        self.notes = dict(network.notes)
        error = message()
        self._engine = self._lib.dcil_engine(graph.handle, isa.encode(), threads, tune_seconds, error)
        if not self._engine:
            raise PlanError(text_of(error))

    def __del__(self) -> None:
        if getattr(self, "_engine", None):
            self._lib.dcil_engine_free(self._engine)

    def __call__(self, images: ArrayLike) -> NDArray[np.float32]:
        """Return the network's output for a batch of images, [n, c, h, w] (or [n, c] for a network of vectors)."""
        x = np.ascontiguousarray(images, dtype=np.float32)
        if x.shape[1:] != self.input_shape or x.ndim != len(self.input_shape) + 1:
            raise ValueError(f"images of shape {x.shape}, but this network takes (n, {str(self.input_shape)[1:-1]})")
        output_bytes = 4 * len(x) * math.prod(self.output_shape)
        if output_bytes > self.max_memory:
            raise PlanError(
                f"the output of {len(x)} images takes {output_bytes} bytes, more than the limit of "
                f"{self.max_memory:.0f} (give fewer images, or raise max_memory)"
            )
        y = np.empty((len(x), *self.output_shape), np.float32)
        if len(x):
            self._call(self._lib.dcil_run, _address(x), len(x), _address(y))
        return y

    def prepare(self, batch: int) -> None:
        """Lay out and tune for this batch size now."""
        if batch < 1:
            raise ValueError(f"batch must be >= 1, got {batch}")
        self._call(self._lib.dcil_prepare, batch)

    def describe(self, batch: int = 1) -> str:
        """Return a line per step: its shapes, the kernel that tuning chose, and its time for one group of images."""
        text, error = ctypes.create_string_buffer(1 << 20), message()
        if self._lib.dcil_describe(self._engine, batch, text, len(text), error) < 0:
            raise PlanError(text_of(error))
        return text_of(text)

    @property
    def memory(self) -> int:
        """Return the bytes held now: weights, tables and the buffers of all concurrent calls."""
        return int(self._lib.dcil_memory(self._engine))

    def _call(self, function: Any, *arguments: Any) -> None:
        error = message()
        if function(self._engine, *arguments, error) != 0:
            raise MemoryError(text_of(error)) if error.value == b"out of memory" else PlanError(text_of(error))


def _address(array: NDArray[np.float32]) -> int:
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
    file: str | Path,
    threads: int = 1,
    isa: str = "",
    tune_seconds: float = 1.5,
    max_memory: float | None = MAX_MEMORY,
    max_work: float | None = MAX_WORK,
) -> Plan:
    """Load and check a plan file; raise PlanError if it is damaged or asks for more than the limits allow."""
    try:
        return Plan(read(file, max_memory), threads, isa, tune_seconds, max_memory, max_work)
    except PlanError as error:
        raise PlanError(str(error) if str(file) in str(error) else f"{file} is not a usable plan: {error}") from None
