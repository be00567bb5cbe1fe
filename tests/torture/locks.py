"""Processes that enter the lock of the same run folder as fast as they can: never two inside."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from forks import isolated, spread
from samples import Samples, scratch
from tally import FINE, HANG, LOST, TRACEBACK, Case, Verdict

from dcil.errors import UserError
from dcil.runs.folder import RunFolder

PROCESSES = 5


def cases(samples: Samples, chance: random.Random, factor: float) -> Iterator[Case]:
    """Two rounds at once, since each of the workers carries out one."""
    for index in range(2):
        yield f"round {index}", partial(stress, 6 * factor)


def stress(seconds: float) -> Verdict:
    with scratch() as folder:
        outcome = isolated(lambda: together(folder, seconds), limit=seconds + 30)
        if outcome.hung:
            return Verdict(HANG)
        if outcome.code != 0:
            return Verdict(TRACEBACK, outcome.err[-300:])
        entries, double = map(int, outcome.out.split())
        return Verdict(LOST, f"{double} of {entries} entries had two inside") if double else Verdict(FINE, f"{entries}")


def together(folder: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    found = spread([partial(enter_often, folder, end)] * PROCESSES, jobs=PROCESSES)
    print(*map(sum, zip(*found, strict=True)))  # noqa: T201


def enter_often(folder: Path, end: float) -> tuple[int, int]:
    """Return how often the lock was entered, and how often somebody else was inside."""
    entries = double = 0
    inside = folder / "inside"
    while time.monotonic() < end:
        try:
            with RunFolder(folder / "run").locked():
                entries += 1
                try:
                    os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    double += 1
                os.sched_yield()
                inside.unlink(missing_ok=True)
        except UserError:  # noqa: PERF203
            os.sched_yield()
    return entries, double
