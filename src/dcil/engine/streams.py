"""CUDA streams: making one, and forking work onto several inside one step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def new_stream(device: torch.device, high_priority: bool = False) -> torch.cuda.Stream:
    """Return a new stream; the GPU starts the kernels of a high-priority one first."""
    return torch.cuda.Stream(device, priority=-1 if high_priority else 0)  # type: ignore[no-untyped-call,unused-ignore]


class Streams:
    """One stream for each key but the first, which uses the current stream; no streams on the CPU."""

    def __init__(self, device: torch.device, keys: Sequence[Hashable]) -> None:
        self.streams: dict[Hashable, torch.cuda.Stream] = {}
        if device.type == "cuda":
            self.streams = {key: new_stream(device, high_priority=True) for key in keys[1:]}

    @contextmanager
    def forked(self, late: bool = False) -> Iterator[Callable[[Hashable], AbstractContextManager[object]]]:
        """Yield a function from a key to a context whose work goes to that key's stream; join all streams at the end.

        The streams start from the current stream as it is here or, if ``late``, as it is where they are entered.
        """

        def on(key: Hashable) -> AbstractContextManager[object]:
            if key not in self.streams:
                return nullcontext()
            if late:
                self.streams[key].wait_stream(torch.cuda.current_stream())
            return torch.cuda.stream(self.streams[key])

        for stream in self.streams.values():
            stream.wait_stream(torch.cuda.current_stream())
        yield on
        for stream in self.streams.values():
            torch.cuda.current_stream().wait_stream(stream)
