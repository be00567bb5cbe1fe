"""The clock of all benchmarks: milliseconds of an action, measured in turns with what it is compared to."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch

Action = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)
Measured = TypeVar("Measured")
CPU = torch.device("cpu")


def wait(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Measures wall-clock time from its construction, the work of the device included."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        wait(device)
        self.start = time.perf_counter()

    def seconds(self) -> float:
        """Wait for the device and return the seconds since the start."""
        wait(self.device)
        return time.perf_counter() - self.start


def call_ms(action: Action, device: torch.device = CPU, calls: int = 1) -> float:
    """Return the milliseconds of one of ``calls`` calls in a row; the device finishes after the last."""
    watch = Stopwatch(device)
    for _ in range(calls):
        action()
    return 1000 * watch.seconds() / calls


def median_ms(action: Action, device: torch.device, warm_up: int, rounds: int, calls: int = 1) -> float:
    """Return the median over ``rounds`` of ``call_ms``, after ``warm_up`` calls that are not timed."""
    for _ in range(warm_up):
        action()
    return statistics.median(call_ms(action, device, calls) for _ in range(rounds))


def repeated_ms(action: Action, at_least_s: float = 0.1, at_least_calls: int = 3) -> list[float]:
    """Return the milliseconds of single calls on the CPU, after one that is not timed."""
    action()
    times: list[float] = []
    watch = Stopwatch()
    while len(times) < at_least_calls or watch.seconds() < at_least_s:
        times.append(call_ms(action))
    return times


def gpu_ms(action: Action, calls: int = 1) -> float:
    """Return the GPU's own milliseconds of one of ``calls`` calls, between two CUDA events."""
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    for _ in range(calls):
        action()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / calls


def in_turns(
    clocks: Mapping[Name, Callable[[], Measured]], rounds: int, warm_up: int = 1
) -> dict[Name, list[Measured]]:
    """Call the clocks in turns, so that whatever else the machine does affects all; drop the ``warm_up`` rounds."""
    found: dict[Name, list[Measured]] = {name: [] for name in clocks}
    for _ in range(warm_up + rounds):
        for name, clock in clocks.items():
            found[name].append(clock())
    return {name: measured[warm_up:] for name, measured in found.items()}
