"""Several trainings in one process: each in a thread and, on a GPU, on a stream of its own, so that they share it
instead of taking turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import torch
from rich.console import Console

from dcil.engine.cuda.ops import new_stream
from dcil.errors import UserError

GPU_RUNS = 4  # at once, unless somebody says otherwise


class Stopped(Exception):
    """Somebody pressed Ctrl-C, or the time is up; raised by a run's progress, it loses nothing."""


def runs_at_once(wanted: int | None, device: torch.device) -> int:
    return wanted or (GPU_RUNS if device.type == "cuda" else 1)


def run_jobs(
    jobs: Mapping[str, Callable[[], None]],
    at_once: int,
    device: torch.device,
    stop: threading.Event,
    console: Console,
) -> dict[str, str]:
    """Do the jobs in their order, ``at_once`` at a time; name -> why, of those that failed. Ctrl-C sets ``stop``."""
    failures: dict[str, str] = {}

    def one(name: str, job: Callable[[], None]) -> None:
        try:
            with own_stream(device):
                job()
        except Stopped:
            pass
        except UserError as error:
            failures[name] = " ".join(str(error).split())
        except Exception as error:  # whatever it is, the other runs go on
            failures[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"

    pool = ThreadPoolExecutor(at_once)
    try:
        for future in [pool.submit(one, name, job) for name, job in jobs.items()]:
            future.result()
    except KeyboardInterrupt:
        stop.set()
        console.print("[bold]stopping[/]; to go on: the same command again")
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return failures


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.stream(new_stream(device)) if device.type == "cuda" else nullcontext()
