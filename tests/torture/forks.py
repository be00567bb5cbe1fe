"""Run a function in a forked child, under limits, and see how it ended: a fork takes milliseconds, imports seconds."""

from __future__ import annotations

import math
import os
import pickle
import resource
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JOBS = min(2, os.cpu_count() or 1)
PATIENCE = 4


@dataclass(frozen=True)
class Outcome:
    """How a child ended: its exit code, or the signal that ended it, and what it printed."""

    code: int | None
    signal: int
    out: str
    err: str
    hung: bool


def isolated(work: Callable[[], object], limit: float = 60, memory: int | None = None) -> Outcome:
    """Run ``work`` in a child; its exit code is what it returns, if that is a number.

    It hangs if it takes ``limit`` seconds of the processor, or several times that on the clock: other processes may be
    at work on this machine.
    """
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            _be_child(work, out, err, limit, memory)
        handle = os.pidfd_open(child)
        hung = not select.select([handle], [], [], PATIENCE * limit)[0]
        if hung:
            os.killpg(child, signal.SIGKILL)
        os.close(handle)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = [file.read_text(errors="replace") if file.exists() else "" for file in (out, err)]
        return Outcome(status if status >= 0 else None, max(0, -status), *texts, hung or -status == signal.SIGXCPU)


def _be_child(work: Callable[[], object], out: Path, err: Path, limit: float, memory: int | None) -> None:
    code = 1
    try:
        os.setsid()
        for number, file in ((1, out), (2, err)):
            target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(target, number)
            os.close(target)
        sys.stdout, sys.stderr = (open(n, "w", encoding="utf-8", closefd=False) for n in (1, 2))  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit), math.ceil(limit) + 5))
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        result = work()
        code = result if isinstance(result, int) else 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def spread(works: Sequence[Callable[[], Any]], jobs: int = JOBS) -> list[Any]:
    """Call all functions, in ``jobs`` forked processes; return their results in order."""
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        children = []
        for job in range(jobs):
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    found = [work() for work in works[job::jobs]]
                    Path(folder, str(job)).write_bytes(pickle.dumps(found))
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            raise RuntimeError(f"a worker of the torture run itself ended with {codes}")
        results: list[Any] = [None] * len(works)
        for job in range(jobs):
            results[job::jobs] = pickle.loads(Path(folder, str(job)).read_bytes())
        return results
