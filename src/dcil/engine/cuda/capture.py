"""Work recorded once as a CUDA graph and replayed: hundreds of kernels for the price of one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dcil.engine.lock import PROCESS_LOCK
from dcil.engine.streams import new_stream

WARM_UPS = 3  # for what libraries do on first sight: choosing algorithms, compiling, allocating


class GraphRecorder:
    """Graphs that share memory, since they run one after the other and keep nothing there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = new_stream(device, high_priority=True) if device.type == "cuda" else None
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def record(self, work: Callable[[], None], before: Callable[[], None]) -> Callable[[], None]:
        """``work`` as one replayable piece, after a few tries, each with ``before`` ahead of it.

        Where there are no graphs, ``work`` itself.
        """
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
        """``work``, which has been done before, as one replayable piece; it is not done now, and nothing waits."""
        if self.stream is None:
            return work
        with PROCESS_LOCK, torch.cuda.stream(self.stream):
            graph = torch.cuda.CUDAGraph()
            # thread_local: runs beside this one go on allocating meanwhile.
            graph.capture_begin(self.pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph.replay


@contextmanager
def restoring(changed: Sequence[Tensor]) -> Iterator[None]:
    """What happens to these tensors inside is forgotten."""
    saved = [tensor.detach().clone() for tensor in changed]
    yield
    with torch.no_grad():
        for tensor, value in zip(changed, saved, strict=True):
            tensor.copy_(value)
