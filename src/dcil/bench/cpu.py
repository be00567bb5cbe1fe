"""Sparse inference on this CPU: ours beside every dense engine that is installed, taking turns in one run.

Ratios are to the fastest dense fp32 engine. Dense INT8 stands beside them, because a pruned fp32 network competes with
that too.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dcil import models
from dcil.bench.engines import DENSE, INT8, SPARSE, Make, Run
from dcil.runtime import instruction_set
from dcil.train.environment import environment


@dataclass(frozen=True)
class Case:
    """A network with zeros in it, one batch size, one thread count."""

    name: str
    masks: str
    model: nn.Module
    x: Tensor
    threads: int


@dataclass
class Timing:
    """Milliseconds per batch: the median of the rounds' medians, and the least of all, which says more when busy.

    ``error`` is relative to torch; ``failed`` says why an engine did not run.
    """

    ms: float = float("nan")
    least: float = float("nan")
    rounds: list[float] = field(default_factory=list)
    error: float = float("nan")
    failed: str = ""


def image_size(name: str) -> int:
    return 224 if name in ("resnet18", "resnet34", "resnet50") else 32


def masked(name: str, masks: str, sparsity: float, seed: int = 0) -> nn.Module:
    """A fresh network under random masks: ``uniform`` over the convolutions, or ``erk`` densities."""
    torch.manual_seed(seed)
    model = models.build(name, 1000 if image_size(name) == 224 else 10).eval()
    weights = [m.weight.data for m in model.modules() if isinstance(m, nn.Conv2d)]
    for weight, density in zip(weights, densities(weights, masks, 1 - sparsity), strict=True):
        kept = torch.rand(weight.numel()).argsort()[max(1, round(density * weight.numel())) :]
        weight.view(-1)[kept] = 0
        weight.div_(max(density, 1e-3) ** 0.5)
    return model


def densities(weights: Sequence[Tensor], masks: str, density: float) -> list[float]:
    """Erdős–Rényi-kernel: in proportion to sum(shape) / prod(shape), never beyond 1 (Evci et al., ICML 2020)."""
    if masks == "uniform":
        return [density] * len(weights)
    full: set[int] = set()
    while True:
        raw = [sum(w.shape) / w.numel() for w in weights]
        rest = [i for i in range(len(weights)) if i not in full]
        budget = density * sum(w.numel() for w in weights) - sum(weights[i].numel() for i in full)
        scale = budget / sum(raw[i] * weights[i].numel() for i in rest)
        more = {i for i in rest if raw[i] * scale > 1}
        if not more:
            return [1.0 if i in full else raw[i] * scale for i in range(len(weights))]
        full |= more


def measure(case: Case, engines: dict[str, Make], rounds: int) -> dict[str, Timing]:
    """All engines take turns, so that whatever else the machine does hits all of them."""
    torch.set_num_threads(case.threads)
    with torch.no_grad():
        want = case.model(case.x).numpy()
    timings: dict[str, Timing] = {}
    runs: dict[str, Run] = {}
    for name, make in engines.items():
        timings[name] = Timing()
        try:
            runs[name] = make(case.model, case.x, case.threads)
            got = np.asarray(runs[name]())
            timings[name].error = float(np.abs(got - want).max() / np.abs(want).max())
        except Exception as error:  # whatever a missing or broken engine raises: it is left out and says why
            runs.pop(name, None)
            timings[name].failed = f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
    for _ in range(rounds):
        for name, run in runs.items():
            median, least = clock(run)
            timings[name].rounds.append(median)
            timings[name].least = min(least, timings[name].least) if len(timings[name].rounds) > 1 else least
    for name in runs:
        timings[name].ms = statistics.median(timings[name].rounds)
    return timings


def clock(run: Callable[[], Any], at_least: float = 0.1) -> tuple[float, float]:
    """The median and the least milliseconds of a few runs."""
    run()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - start < at_least:
        begin = time.perf_counter()
        run()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times), min(times)


def best_dense(timings: dict[str, Timing]) -> tuple[float, float]:
    """The fastest dense fp32 engine's median and least time."""
    ran = [t for name, t in timings.items() if name in DENSE and not t.failed]
    nothing = float("nan")
    return min((t.ms for t in ran), default=nothing), min((t.least for t in ran), default=nothing)


def run(cases: Sequence[Case], engines: Sequence[str], rounds: int, out: Path | None) -> None:
    """Measure every case and print a table; ``out`` gets everything as JSON."""
    console, every = Console(), {**SPARSE, **DENSE, **INT8}
    records: list[dict[str, Any]] = []
    for case in cases:
        timings = measure(case, {name: every[name] for name in engines}, rounds)
        console.print(table_of(case, timings))
        records.append(record_of(case, timings))
        if out:  # after every case, so that a long run that is interrupted leaves what it has
            machine = {**environment(torch.device("cpu")), "isa": instruction_set(), "load": os.getloadavg()}
            out.write_text(json.dumps({"machine": machine, "cases": records}, indent=1))


def table_of(case: Case, timings: dict[str, Timing]) -> Table:
    title = f"{case.name}, {case.masks}, batch {len(case.x)}, {case.threads} thread{'s' * (case.threads > 1)}"
    table = Table("engine", "ms", "least ms", "x best dense fp32", "by least", "error", title=title)
    best, best_least = best_dense(timings)
    for name, timing in timings.items():
        if timing.failed:
            table.add_row(name, "", "", timing.failed)
        else:
            ratios = f"{best / timing.ms:.2f}", f"{best_least / timing.least:.2f}"
            table.add_row(name, f"{timing.ms:.3f}", f"{timing.least:.3f}", *ratios, f"{timing.error:.0e}")
    return table


def record_of(case: Case, timings: dict[str, Timing]) -> dict[str, Any]:
    best, best_least = best_dense(timings)
    return {
        "network": case.name,
        "masks": case.masks,
        "batch": len(case.x),
        "threads": case.threads,
        "best_dense_ms": best,
        "ratios": {name: best / t.ms for name, t in timings.items() if not t.failed},
        "ratios_least": {name: best_least / t.least for name, t in timings.items() if not t.failed},
        "engines": {name: asdict(t) for name, t in timings.items()},
    }
