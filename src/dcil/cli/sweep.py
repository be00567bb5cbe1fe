"""Train many networks: a grid of methods, models, sparsities and seeds, or a list, several at once on a GPU, or on a
Ray cluster.

Each run has its own folder below --out. The same command resumes stopped runs, with --on or without."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from rich.console import Console

from dcil import data
from dcil.cli import on_ray, report, search
from dcil.cli.parser import Parser, filepath, say, seconds, up_to
from dcil.cli.streams import complain
from dcil.cli.train import add_options, engine_settings, options_of
from dcil.engine import EngineSettings
from dcil.engine.process_group import require_single_process
from dcil.errors import UserError
from dcil.runs.progress import Progress, progress_bars
from dcil.train import Config, train
from dcil.train.budget import Budget, within_budget
from dcil.train.memory import keep_freed_memory
from dcil.train.method_settings import parse_value
from dcil.train.parallel import GPU_RUNS, run_jobs, runs_at_once
from dcil.train.plan import REPORT, PlannedRun
from dcil.train.sweep import grid, plan_sweep, read_list

#: Option -> the field of the config that it lists values for.
AXES = {"models": "model", "methods": "method", "sparsities": "sparsity", "seeds": "seed"}


def main(words: Sequence[str]) -> int:
    require_single_process("dcil sweep")
    parser = Parser("dcil sweep", __doc__)
    add_options(parser)
    for option, field in AXES.items():
        parser.add_argument(f"--{option}", metavar="A,B,…", help=f"values of --{field}: every combination is a run")
    parser.add_argument("--list", type=filepath, metavar="FILE", help="JSON list of objects, each the options of a run")
    parser.add_argument("--parallel", type=up_to(64), metavar="N", help=f"runs at once ({GPU_RUNS} on a GPU, else 1)")
    parser.add_argument("--budget", type=seconds, metavar="TIME", help="time limit such as 25m, 2h or 90s")
    on_ray.add_options(parser)
    search.add_options(parser)
    args = parser.parse(words)
    budget = Budget.of(args.budget)
    on_ray.check(args)
    search.check(args)
    if args.out is None:
        raise UserError("--out is missing: the folder for the runs")
    axes = {
        field: values(option, text) for option, field in AXES.items() if (text := getattr(args, option)) is not None
    }
    for option, field in AXES.items():
        if field in axes and hasattr(args, field):
            raise UserError(f"--{option} lists the values of --{field}; give one of the two")
    if args.search:
        if axes or args.list:
            raise UserError("--search draws the runs; give it, or --list, or the values of a grid")
        return search.run(Console(), args, options_of(args), budget)
    if axes and args.list:
        raise UserError(f"--list names every run; give it or --{next(o for o, f in AXES.items() if f in axes)}")
    wanted = read_list(args.list) if args.list else grid(axes)
    runs = plan_sweep(args.out, [options_of(args) | one for one in wanted], args.recipe)
    failures = train_all(Console(), runs, args, budget)
    done = [run.folder.path for run in runs if run.folder.summary() is not None]
    if done:
        report.show(done, args.out / REPORT)
    resumes = budget.end < float("inf") and len(done) + len(failures) < len(runs)
    say(f"{len(done)} of {len(runs)} runs are complete" + ("; the same command resumes" if resumes else ""))
    for name, reason in failures.items():
        complain(f"{name} failed: {reason}")
    return 1 if failures else 0


def values(option: str, text: str) -> list[Any]:
    """Read the comma-separated values of one axis of the grid."""
    kind = typing.get_type_hints(Config)[AXES[option]]
    try:
        found = [parse_value(kind, word) for word in text.split(",") if word]
    except ValueError as error:
        raise UserError(f"--{option}: each {error}") from None
    if not found:
        raise UserError(f"--{option} must have at least one value, got {text!r}")
    return found


def train_all(console: Console, runs: Sequence[PlannedRun], args: argparse.Namespace, budget: Budget) -> dict[str, str]:
    """Train all runs, here or on Ray; return the reason for each that failed, by name."""
    models = {run.config.model for run in runs}
    if args.on is not None:
        with on_ray.cluster(args, models) as share:
            settings = replace(engine_settings(args), shared_gpu=0 < share.gpus < 1)
            return on_ray.sweep(console, runs, args, share, settings, budget)
    at_once = runs_at_once(args.parallel, args.device, models)
    settings = replace(engine_settings(args), shared_gpu=at_once > 1)
    keep_freed_memory()
    return execute(console, runs, at_once, args, settings, budget)


def execute(
    console: Console,
    runs: Sequence[PlannedRun],
    at_once: int,
    args: argparse.Namespace,
    settings: EngineSettings,
    budget: Budget,
) -> dict[str, str]:
    """Train all runs in this process, ``at_once`` at a time; return the reason for each that failed, by name."""
    load = cache(data.load)  # once for all runs

    def one(run: PlannedRun, show: Progress) -> None:
        if budget.allows(0):
            train(
                run.config,
                run.folder,
                args.data_dir,
                args.device,
                within_budget(show, budget),
                settings,
                load,
                checkpoint_minutes=args.checkpoint_minutes,
            )

    with progress_bars(console, [(run.name, run.config.total_epochs) for run in runs]) as shows:
        jobs = {run.name: partial(one, run, show) for run, show in zip(runs, shows, strict=True)}
        return run_jobs(jobs, at_once, args.device, budget.over, console)
