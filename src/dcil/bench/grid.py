"""What a grid costs besides training: trivial runs on a local Ray cluster, and the same one after another here."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dcil import report
from dcil.engine import EngineSettings
from dcil.integrations.ray import Job, run_on_ray
from dcil.integrations.ray_cluster import Share, connected
from dcil.runs.environment import environment
from dcil.runs.folder import RunFolder
from dcil.runs.outputs import write_output_text
from dcil.runs.progress import Progress
from dcil.train import remote_runs
from dcil.train.budget import Budget
from dcil.train.memory import keep_freed_memory
from dcil.train.plan import PlannedRun
from dcil.train.sweep import grid, plan_sweep

#: One step on the digits, and its evaluation.
TRIVIAL = {"method": "gmp", "epochs": 1, "batch": 1437}
BATCH = 50  # runs of a round


def run(runs: int, out: Path) -> None:
    """Measure and print. A tenth as many runs are trained here, in turns with the others: what else the machine does
    then slows both."""
    console = Console(soft_wrap=True)
    found: dict[str, Any] = {"runs": runs}
    keep_freed_memory()
    torch.set_num_threads(Share().cpus)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        here, planned = plan(base / "here", -(-runs // 10)), plan(base / "runs", runs, found, "plan_seconds")
        begun = time.perf_counter()
        with connected("local", 1):
            found["cluster_seconds"] = time.perf_counter() - begun
            train_here(plan(base / "warm", 1))
            run_jobs([job(one) for one in plan(base / "warm-ray", 1)], base)  # the worker imports torch
            found["nothing_ms"] = 1000 * timed(lambda: run_jobs(idle_jobs(base, runs), base)) / runs
            found |= in_turns(here, planned, base / "runs")
        found["complete"] = sum(one.folder.summary() is not None for one in planned)
        plan(base / "runs", runs, found, "plan_again_seconds")
        folders = [one.folder.path for one in planned]
        found["report_seconds"] = timed(lambda: report.build(folders, base / "report.html"))
        found["report_mib"] = (base / "report.html").stat().st_size / 2**20
    found = {name: round(value, 3) for name, value in found.items()}
    found["environment"] = environment(torch.device("cpu"))
    write_output_text(out, json.dumps(found, indent=1) + "\n")
    for name, value in found.items():
        console.print(f"{name:20} {value}", highlight=False)
    console.print(f"written: {out}", highlight=False)


def in_turns(here: Sequence[PlannedRun], planned: Sequence[PlannedRun], out: Path) -> dict[str, float]:
    """Return the medians over rounds of the time of a run here, on Ray, and of their difference, in ms."""
    rounds = []
    for start in range(0, len(planned), BATCH):
        alone, tasks = here[start // 10 : (start + BATCH) // 10], [job(one) for one in planned[start : start + BATCH]]
        alone_ms = 1000 * train_here(alone) / len(alone)
        rounds.append((alone_ms, 1000 * timed(partial(run_jobs, tasks, out)) / len(tasks)))
    return {
        "alone_ms": statistics.median(alone for alone, _ in rounds),
        "ray_ms": statistics.median(ray for _, ray in rounds),
        "overhead_ms": statistics.median(ray - alone for alone, ray in rounds),
    }


def plan(out: Path, runs: int, found: dict[str, Any] | None = None, name: str = "") -> list[PlannedRun]:
    """Plan trivial runs with seeds of their own; note the time in ``found``."""
    begun = time.perf_counter()
    planned = plan_sweep(out, [TRIVIAL | one for one in grid({"seed": range(runs)})], None)
    if found is not None:
        found[name] = time.perf_counter() - begun
    return planned


def job(run: PlannedRun) -> Job:
    return Job(run.name, run.folder, 1, remote_runs.train_text, text_of(run))


def text_of(run: PlannedRun) -> str:
    return remote_runs.to_text(run, remote_runs.Place(Path("data"), "cpu", EngineSettings()), 10.0)


def idle_jobs(out: Path, runs: int) -> list[Job]:
    """Return jobs that do nothing: what is left is the scheduler."""
    return [Job(str(i), RunFolder(out / "nothing" / str(i)), 1, do_nothing, "") for i in range(runs)]


def do_nothing(text: str, progress: Progress) -> None: ...


def train_here(runs: Sequence[PlannedRun]) -> float:
    """Train runs in this process, as workers do; return the seconds."""
    texts = [text_of(run) for run in runs]
    begun = time.perf_counter()
    for text in texts:
        remote_runs.train_text(text, lambda epoch, part, row: None)
    return time.perf_counter() - begun


def run_jobs(jobs: Sequence[Job], out: Path) -> None:
    if failures := run_on_ray(jobs, out, Share(), Budget(), Console(quiet=True)):
        raise RuntimeError(next(iter(failures.values())))


def timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
