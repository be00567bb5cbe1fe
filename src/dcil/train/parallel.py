"""Parallel runs in one process: each in a thread and, on a GPU, on a CUDA stream of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch

from dcil.engine.streams import new_stream
from dcil.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

GPU_RUNS = 4  # default number of parallel runs on a GPU


class BestAtOnce(NamedTuple):
    """The number of parallel runs on a GPU with the most steps per second in all, and where that was measured."""

    runs: int
    source: str


#: Networks for which it was measured (``dcil bench train --models NAME --parallel 1,2,4,8``); others take GPU_RUNS.
BEST_AT_ONCE = {
    "resnet20": BestAtOnce(4, "benchmarks/h200.json: 1.30 ms per DCIL step and run alone, 0.99 at 4, 1.12 at 8"),
    "resnet32": BestAtOnce(6, "benchmarks/h200-parallel.json: 1.88 ms alone, 1.69 at 4, 1.61 at 6"),
    "wrn-28-2": BestAtOnce(4, "benchmarks/h200-parallel.json: 2.77 ms alone, 2.24 at 2, 2.27 at 4, 2.25 at 6"),
}


class Stopped(Exception):
    """Raised by a run's progress callback to stop it, after Ctrl-C or at the end of a time budget; nothing is lost."""


def runs_at_once(wanted: int | None, device: torch.device, models: Iterable[str] = ()) -> int:
    """Return the number of parallel runs: ``wanted``, or what is best for the device and the networks together."""
    measured = [BEST_AT_ONCE[model].runs for model in models if model in BEST_AT_ONCE]
    return wanted or (min(measured, default=GPU_RUNS) if device.type == "cuda" else 1)


def run_jobs(
    jobs: Mapping[str, Callable[[], None]],
    at_once: int,
    device: torch.device,
    stop: threading.Event,
    console: Console,
) -> dict[str, str]:
    """Run the jobs, ``at_once`` at a time; return the reason for each that failed, by name. Ctrl-C sets ``stop``."""
    failures: dict[str, str] = {}

    def one(name: str, job: Callable[[], None]) -> None:
        try:
            with own_stream(device):
                job()
        except Stopped:
            pass
        except Exception as error:  # one failure must not end the other runs
            failures[name] = reason(error)
            console.print(f"{name} failed: {failures[name]}", markup=False, highlight=False)  # the others take long

    pool = ThreadPoolExecutor(at_once)
    try:
        for future in [pool.submit(one, name, job) for name, job in jobs.items()]:
            future.result()
    except KeyboardInterrupt:
        stop.set()
        console.print("[bold]stopping[/]; to continue: the same command again")
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return failures


def reason(error: Exception) -> str:
    """Return in one line why a run failed."""
    line = " ".join(str(error).split())
    return line if isinstance(error, UserError) else f"{type(error).__name__}: {line}"


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which this thread works on a CUDA stream of its own."""
    return torch.cuda.stream(new_stream(device)) if device.type == "cuda" else nullcontext()
