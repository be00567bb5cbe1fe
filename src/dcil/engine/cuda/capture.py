"""Record work as a CUDA graph and replay it: one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dcil.engine.lock import PROCESS_LOCK
from dcil.engine.streams import new_stream

WARM_UPS = 3  # libraries choose algorithms, compile and allocate in their first calls


class GraphRecorder:
    """Records graphs that share one memory pool: they run one after the other and keep nothing in it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = new_stream(device, high_priority=True) if device.type == "cuda" else None
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def record(self, work: Callable[[], None], before: Callable[[], None]) -> Callable[[], None]:
        """Warm up, each time after ``before``, record ``work`` and return its replay; without CUDA return ``work``."""
        if self.stream is None:
            return work
        with PROCESS_LOCK:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                for _ in range(WARM_UPS):
                    before()
                    work()
            torch.cuda.current_stream().wait_stream(self.stream)
            torch.cuda.synchronize(self.device)
            return self.capture(work)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record ``work``, which must have run before, and return its replay; does not execute it or wait."""
        if self.stream is None:
            return work
        with PROCESS_LOCK, torch.cuda.stream(self.stream):
            graph = torch.cuda.CUDAGraph()
            # thread_local: runs in other threads may allocate meanwhile.
            graph.capture_begin(self.pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph.replay


@contextmanager
def restoring(changed: Sequence[Tensor]) -> Iterator[None]:
    """Restore these tensors on exit."""
    saved = [tensor.detach().clone() for tensor in changed]
    yield
    with torch.no_grad():
        for tensor, value in zip(changed, saved, strict=True):
            tensor.copy_(value)
