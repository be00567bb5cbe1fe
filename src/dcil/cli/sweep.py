"""Train many networks: a grid of methods, models, sparsities and seeds, or a list, several at once on a GPU.

Each run has its own folder below --out. The same command again goes on where it was stopped."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dcil import METHODS, data
from dcil.cli import report
from dcil.cli.parser import Parser, number, positive, say, whole
from dcil.cli.train import CONFIG, add_options, base_config, check_same, override, speed_of
from dcil.engine import EngineSettings
from dcil.engine.process_group import alone
from dcil.errors import UserError, unknown
from dcil.runs.progress import Progress, progress_bars
from dcil.train import Config, RunFolder, train
from dcil.train.memory import keep_freed_memory
from dcil.train.parallel import GPU_RUNS, Stopped, run_jobs, runs_at_once

#: Option -> the field of the config that it lists values for, and how one is read.
AXES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "models": ("model", str),
    "methods": ("method", str),
    "sparsities": ("sparsity", number),
    "seeds": ("seed", whole),
}


@dataclass(frozen=True)
class Run:
    name: str
    folder: RunFolder
    config: Config


def main(words: Sequence[str]) -> int:
    alone("dcil sweep")
    parser = Parser("dcil sweep", __doc__)
    add_options(parser)
    for option, (field, _) in AXES.items():
        parser.add_argument(f"--{option}", metavar="A,B,…", help=f"values for {field}: every combination is a run")
    parser.add_argument("--list", type=Path, metavar="FILE", help="JSON: a list of objects, each the settings of a run")
    parser.add_argument("--parallel", type=positive, metavar="N", help=f"runs at once ({GPU_RUNS} on a GPU, else 1)")
    args = parser.parse(words)
    if args.out is None:
        raise UserError("--out is missing: the folder for the runs")
    flags = {name: getattr(args, name) for name in CONFIG if hasattr(args, name)}
    axes = {field: values(getattr(args, option), kind) for option, (field, kind) in AXES.items()}
    wanted = listed(args.list) if args.list else grid({f: v for f, v in axes.items() if v is not None})
    runs = plan(args.out, [flags | one for one in wanted], args.recipe)
    at_once = runs_at_once(args.parallel, args.device)
    speed = replace(speed_of(args), shared_gpu=at_once > 1)
    keep_freed_memory()
    failures = execute(Console(), runs, at_once, args.data_dir, args.device, speed)
    done = [run.folder.path for run in runs if run.folder.summary() is not None]
    if done:
        report.show(done, args.out / "report.html")
    say(f"{len(done)} of {len(runs)} runs are complete")
    for name, reason in failures.items():
        sys.stderr.write(f"dcil: {name} failed: {reason}\n")
    return 1 if failures else 0


def values(text: str | None, kind: Callable[[str], Any]) -> list[Any] | None:
    if text is None:
        return None
    try:
        return [kind(word) for word in text.split(",") if word]
    except Exception as error:  # argparse's own, whose text is for people
        raise UserError(str(error)) from None


def grid(axes: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Every combination; a method that prunes nothing comes once, not once per sparsity."""
    found: list[dict[str, Any]] = []
    for combination in itertools.product(*axes.values()):
        one = dict(zip(axes, combination, strict=True))
        method = one.get("method", "dcil")
        if method not in METHODS:
            raise unknown("method", method, METHODS)
        if not METHODS[method].prunes:
            one.pop("sparsity", None)
        if one not in found:
            found.append(one)
    return found


def listed(file: Path) -> list[dict[str, Any]]:
    """The runs of a file: objects with names of options as keys, "settings" an object of its own."""
    try:
        runs = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"--list {file}: {error}") from None
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        raise UserError(f"--list {file}: expected a list of objects")
    for run in runs:
        for key in run:
            if key not in CONFIG and key != "name":
                raise unknown("setting in the list", key, [*CONFIG, "name"])
        if "settings" in run:
            run["settings"] = [(name, str(value)) for name, value in run["settings"].items()]
        if "milestones" in run:
            run["milestones"] = tuple(run["milestones"])
    return runs


def plan(out: Path, wanted: Sequence[dict[str, Any]], recipe: str | None) -> list[Run]:
    """The configs of all runs, before anything is written; those that are in their folders already must agree."""
    runs: list[Run] = []
    for given in wanted:
        flags = {key: value for key, value in given.items() if key not in ("name", "method")}
        method = given.get("method")
        config = override(base_config(flags, recipe, method or "dcil"), flags)
        name = str(given.get("name") or name_of(config))
        folder = RunFolder(out / name)
        if any(run.name == name for run in runs):
            raise UserError(f"two runs would be called {name}: give them names in a --list")
        runs.append(Run(name, folder, check_same(folder, method, flags, recipe) if folder.started else config))
    return runs


def name_of(config: Config) -> str:
    pruned = f"-{config.granularity}{config.sparsity:g}" if METHODS[config.method].prunes else ""
    return f"{config.dataset}-{config.model}-{config.method}{pruned}-seed{config.seed}"


def execute(
    console: Console, runs: Sequence[Run], at_once: int, data_dir: Path, device: torch.device, speed: EngineSettings
) -> dict[str, str]:
    """Train them all, ``at_once`` at a time; name -> why, of those that failed."""
    stop = threading.Event()
    load = cache(data.load)  # once for all runs

    def one(run: Run, show: Progress) -> None:
        train(run.config, run.folder, data_dir, device, partial(going_on, show, stop), speed, load)

    with progress_bars(console, [(run.name, run.config.total_epochs) for run in runs]) as shows:
        jobs = {run.name: partial(one, run, show) for run, show in zip(runs, shows, strict=True)}
        return run_jobs(jobs, at_once, device, stop, console)


def going_on(show: Progress, stop: threading.Event, epoch: int, part: float, row: dict[str, Any] | None) -> None:
    if stop.is_set():
        raise Stopped
    show(epoch, part, row)
