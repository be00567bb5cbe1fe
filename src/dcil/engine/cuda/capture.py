"""Record work as a CUDA graph and replay it: one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcil.engine.lock import PROCESS_LOCK
from dcil.engine.streams import new_stream

WARM_UPS = 2  # libraries choose algorithms, compile and allocate in their first calls


class GraphRecorder:
    """Records graphs that share one memory pool: they run one after the other, and what one leaves is held by it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = new_stream(device, high_priority=True) if device.type == "cuda" else None
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        # torch cannot record into a pool again once all of its recordings are gone: this one stays.
        nothing = partial(torch.zeros, 1, device=device)
        self.run(nothing)
        self.first = self.capture(nothing)

    def run(self, work: Callable[[], Any]) -> Any:
        """Do ``work`` as it is, on the stream that it will be recorded on, and return its result."""
        if self.stream is None:
            return work()
        with PROCESS_LOCK:
            here = torch.cuda.current_stream(self.device)
            self.stream.wait_stream(here)
            with torch.cuda.stream(self.stream):
                found = work()
            here.wait_stream(self.stream)
        return found

    def release_cache(self) -> None:
        """Give back what work that was not recorded has left in torch's cache: a recording cannot use it."""
        if self.stream is not None:
            with PROCESS_LOCK:  # this waits for the device, which another thread's recording does not survive
                torch.cuda.empty_cache()

    def capture(self, work: Callable[[], Any]) -> Recording:
        """Record ``work``, which must have run before; does not execute it or wait. Without CUDA a replay does it."""
        if self.stream is None:
            return Recording(work, None)
        with PROCESS_LOCK, torch.cuda.stream(self.stream):
            graph = torch.cuda.CUDAGraph()
            # thread_local: runs in other threads may allocate meanwhile.
            graph.capture_begin(self.pool, capture_error_mode="thread_local")
            try:
                found = work()
            except BaseException:
                with suppress(RuntimeError):  # that the recording has failed
                    graph.capture_end()
                raise
            graph.capture_end()
        return Recording(graph.replay, found)


class Recording(NamedTuple):
    """Work that can be repeated, and the tensors that it leaves its result in (without CUDA the replay returns it)."""

    replay: Callable[[], Any]
    result: Any

    def __call__(self) -> Any:
        found = self.replay()
        return self.result if found is None else found


class Recordings:
    """Recordings by key: work with a new key is done as it is for a few times, then recorded, then replayed."""

    def __init__(self, recorder: GraphRecorder) -> None:
        self.recorder = recorder
        self.done: dict[Hashable, int] = {}
        self.kept: dict[Hashable, Recording] = {}

    def run(self, key: Hashable, work: Callable[[], Any]) -> Any:
        """Do ``work``, whose computation the key determines; the result's memory is that of the next replay too."""
        if (kept := self.kept.get(key)) is not None:
            return kept()
        done = self.done[key] = self.done.get(key, 0) + 1
        if done <= WARM_UPS and self.recorder.stream is not None:
            return self.recorder.run(work)
        self.recorder.release_cache()
        self.kept[key] = self.recorder.capture(work)
        return self.kept[key]()

    def forget(self, stale: Callable[[Any], bool]) -> None:
        """Drop the recordings with ``stale`` keys, and the memory that they hold."""
        if keys := [key for key in self.kept if stale(key)]:
            for key in keys:
                del self.kept[key], self.done[key]
            self.recorder.release_cache()


@contextmanager
def restoring(changed: Sequence[Tensor]) -> Iterator[None]:
    """Restore these tensors on exit."""
    saved = [tensor.detach().clone() for tensor in changed]
    yield
    with torch.no_grad():
        for tensor, value in zip(changed, saved, strict=True):
            tensor.copy_(value)
