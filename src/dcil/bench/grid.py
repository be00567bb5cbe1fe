"""What a grid costs besides training: trivial runs on a local Ray cluster, and the same one after another here."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
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


def run(runs: int, alone: int, out: Path) -> None:
    """Measure and print; ``alone`` runs are trained here before the others and as many after."""
    console = Console(soft_wrap=True)
    found: dict[str, Any] = {"runs": runs, "alone": 2 * alone}
    keep_freed_memory()
    torch.set_num_threads(Share().cpus)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        before = train_here(plan(base / "before", alone))
        begun = time.perf_counter()
        with connected("local", 1):
            found["cluster_seconds"] = time.perf_counter() - begun
            run_jobs([job(one) for one in plan(base / "warm", 1)], base)  # the worker imports torch
            found["nothing_ms"] = 1000 * timed(lambda: run_jobs(idle_jobs(base, runs), base)) / runs
            planned = plan(base / "runs", runs, found, "plan_seconds")
            found["ray_ms"] = 1000 * timed(lambda: run_jobs([job(one) for one in planned], base / "runs")) / runs
        after = train_here(plan(base / "after", alone))
        found["alone_ms"] = 1000 * (before + after) / (2 * alone)
        found["overhead_ms"] = found["ray_ms"] - found["alone_ms"]
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
    """Train runs in this process, as workers do; return the seconds, without those of a first run."""
    texts = [text_of(run) for run in runs]
    silent: Progress = lambda epoch, part, row: None  # noqa: E731
    remote_runs.train_text(texts[0], silent)
    begun = time.perf_counter()
    for text in texts[1:]:
        remote_runs.train_text(text, silent)
    seconds = time.perf_counter() - begun
    return seconds * len(texts) / max(1, len(texts) - 1)


def run_jobs(jobs: Sequence[Job], out: Path) -> None:
    if failures := run_on_ray(jobs, out, Share(), Budget(), Console(quiet=True)):
        raise RuntimeError(next(iter(failures.values())))


def timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
