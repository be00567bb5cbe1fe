"""Measure how long calls of a plan take."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcil_runtime.plan import Plan

LEAST_CALLS, MOST_CALLS = 5, 1_000_000


def measure(plan: Plan, batch: int, seconds: float) -> dict[str, Any]:
    """Call the plan with noise for about ``seconds``, after it was tuned; the least and the median of a call's time."""
    x = [_noise(batch, shape, dtype) for shape, dtype in plan.inputs]
    plan.prepare(batch)
    plan(*x)
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < LEAST_CALLS or (time.perf_counter() < end and len(taken) < MOST_CALLS):
        begin = time.perf_counter()
        plan(*x)
        taken.append(time.perf_counter() - begin)
    median = statistics.median(taken)
    return {
        "batch": batch,
        "calls": len(taken),
        "least_ms": 1000 * min(taken),
        "median_ms": 1000 * median,
        "images_per_second": batch / median,
    }


def _noise(batch: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Return noise, or ones where a network reads tokens: a vocabulary has at least two."""
    if dtype == "int64":
        return np.ones((batch, *shape), np.int64)
    return np.random.default_rng(0).standard_normal((batch, *shape), np.float32)


def as_text(file: str, plan: Plan, found: list[dict[str, Any]]) -> str:
    """Return a table of what was measured, one batch size a line."""
    threads = f"{plan.threads} thread{'s' * (plan.threads != 1)}"
    head = f"{'batch':>5} {'least ms':>10} {'median ms':>10} {'images/s':>10} {'calls':>8}\n"
    rows = (
        f"{row['batch']:5d} {row['least_ms']:10.4f} {row['median_ms']:10.4f} {row['images_per_second']:10.1f} "
        f"{row['calls']:8d}\n"
        for row in found
    )
    return f"{file}: {plan.isa}, {threads}\n\n{head}{''.join(rows)}"
