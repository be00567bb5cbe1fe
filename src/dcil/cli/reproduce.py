"""Reproduce the paper's tables: train the missing runs of a table, or build the page that compares them all.

TABLE is a table's name, the beginning of names, several (comma-separated), or all; "iterations" is the paper's
figure of the accuracy after every iteration. The same command resumes stopped runs."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from dcil import data
from dcil.cli import on_ray
from dcil.cli.parser import Parser, device, epochs, filepath, positive, run_path, say, seconds, up_to
from dcil.cli.streams import complain
from dcil.cli.train import add_engine_options, engine_settings
from dcil.engine.process_group import require_single_process
from dcil.errors import UserError
from dcil.report.formatting import duration
from dcil.reproduce import iterations, records, tables
from dcil.reproduce.cells import Cell
from dcil.reproduce.estimate import Estimate
from dcil.reproduce.pool import Pool
from dcil.reproduce.session import CellRun, RunOptions
from dcil.runs.environment import environment, hardware
from dcil.runs.outputs import check_run_files
from dcil.runs.progress import progress_lines
from dcil.train.budget import Budget
from dcil.train.memory import keep_freed_memory
from dcil.train.parallel import GPU_RUNS, Stopped, runs_at_once

if TYPE_CHECKING:
    from dcil.integrations.ray_cluster import Share


def main(words: Sequence[str]) -> int:
    require_single_process("dcil reproduce")
    parser = Parser("dcil reproduce", __doc__)
    add_options(parser)
    args = parser.parse(words)
    budget = Budget.of(args.budget)
    on_ray.check(args)
    if args.list:
        list_tables()
        return 0
    out = args.out / f"trial-{args.epochs}" if args.epochs else args.out
    code = 0
    if args.table == "iterations":
        if args.on is not None:
            raise UserError("iterations must be recorded on this machine, got --on; drop it")
        code = run_iterations(args, out, budget)
    elif args.table is not None:
        code = run_tables(args, out, budget)
    elif not args.report:
        raise UserError(f"TABLE must be given: one of {', '.join(tables.names())}, iterations, all; or --report")
    if args.report:
        from dcil.reproduce import report  # here, because matplotlib takes a second to load

        docs = args.docs or (out / "docs" if args.epochs else Path("docs"))
        for file in report.build(out, docs, args.epochs):
            say(f"wrote {file}")
    return code


def add_options(parser: Parser) -> None:
    parser.add_argument("table", nargs="?", metavar="TABLE", help="the table to train (see --list)")
    parser.add_argument(
        "--cells", metavar="FILTER", help="cells to train, in this order: parts of their names, or patterns with *"
    )
    parser.add_argument(
        "--seeds", type=up_to(1000), metavar="N", help="runs per cell, seeds 0 to N-1 (3; of a method in beyond 1)"
    )
    parser.add_argument("--budget", type=seconds, metavar="TIME", help="time limit such as 25m, 2h or 90s")
    parser.add_argument("--parallel", type=up_to(64), metavar="N", help=f"runs at once ({GPU_RUNS} on a GPU, else 1)")
    parser.add_argument(
        "--out", type=run_path, default=Path("results"), metavar="DIR", help="folder of records (results)"
    )
    parser.add_argument("--docs", type=filepath, metavar="DIR", help="folder that --report writes to (docs)")
    parser.add_argument(
        "--data-dir", type=filepath, default=Path("data"), metavar="DIR", help="folder of the data sets"
    )
    parser.add_argument("--device", type=device, default="auto", help="cpu, cuda, cuda:N or auto (cuda if available)")
    parser.add_argument(
        "--epochs", type=positive, metavar="N", help="shorten every run to N epochs, in a folder of its own"
    )
    parser.add_argument("--at", type=epochs, default=iterations.EPOCHS, metavar="A,…", help="epochs of iterations")
    parser.add_argument("--tidy", action="store_true", help="remove the working folder of a run once it is recorded")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and their estimated time; train nothing")
    parser.add_argument("--report", action="store_true", help="build the results page from the records")
    parser.add_argument("--list", action="store_true", help="list the tables with their numbers of cells")
    add_engine_options(parser)
    on_ray.add_options(parser)


def list_tables() -> None:
    for name in tables.names():
        say(f"{name:28} {len(tables.cells_of(name)):3} cells")
    say(f"{'iterations':28} {len(iterations.CELLS):3} cells: accuracy after every iteration of an epoch")


def run_options(args: argparse.Namespace, cells: Sequence[Cell], share: Share | None = None) -> RunOptions:
    at_once = runs_at_once(args.parallel, args.device, {cell.model for cell in cells})
    if share is not None and not share.gpus:
        at_once = 1  # CPUs of its own
    settings = replace(engine_settings(args), shared_gpu=at_once > 1)
    return RunOptions(args.data_dir, args.device, settings, at_once, cache(data.load))


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160)  # a log file has no terminal width


def run_tables(args: argparse.Namespace, out: Path, budget: Budget) -> int:
    """Train the runs of tables, here or on Ray."""
    names = tables.parse_names(args.table)
    cells = tables.cells_of_all(names, args.cells)
    seeds = {cell: args.seeds or tables.seeds_of(cell, names) for cell in cells}
    runs = [CellRun(cell, seed, out, args.epochs) for cell in cells for seed in range(seeds[cell])]
    if args.on is None:
        return run_missing(args, runs, out, budget, None)
    if args.dry_run:  # without the cluster nothing is known of its devices: times are those of one run at a time
        tell_missing(args, runs, Estimate(records.read_all(out)), 1)
        return 0
    with on_ray.cluster(args, {cell.model for cell in cells}) as share:
        return run_missing(args, runs, out, budget, share)


def run_missing(
    args: argparse.Namespace, runs: Sequence[CellRun], out: Path, budget: Budget, share: Share | None
) -> int:
    """Train the runs without a record: in the order in which --cells names them, cheapest first."""
    options = run_options(args, [run.cell for run in runs], share)
    known = hardware(environment(args.device)) if share is None else ""  # that of a cluster may be of several kinds
    estimate = Estimate(records.read_all(out), options.at_once, known)
    at_once = options.at_once if share is None else max(1, on_ray.capacity(share))
    missing = tell_missing(args, runs, estimate, at_once)
    if args.dry_run or not missing:
        return 0
    failures = check_inputs(missing, options, out)
    wanted = [run for run in missing if run.label not in failures]
    if share is None:
        keep_freed_memory()
        pool = Pool(options, budget, console(), args.tidy, iterations.snapshots)
        failures |= pool.run(wanted, estimate.seconds_per_epoch)
    else:
        failures |= on_ray.reproduce(console(), wanted, out, options, share, budget, args.tidy)
    return tell(runs, failures)


def tell_missing(args: argparse.Namespace, runs: Sequence[CellRun], estimate: Estimate, at_once: int) -> list[CellRun]:
    """Return the runs without a record in the order of training; say how many, how long, and for a dry run which."""
    left = {run: estimate.seconds_left(run) for run in runs if not run.done}
    missing = sorted(left, key=lambda run: (tables.place_among(run.cell, args.cells) or 0, left[run], run.seed))
    for run in missing if args.dry_run else ():
        say(f"{run.label:52} {duration(left[run]):>12}  {estimate.pace(run).basis}")
    if not missing:
        say(f"all {len(runs)} runs are recorded")
        return []
    rest = f"about {duration(sum(left.values()) / at_once)}, {at_once} at once{estimate.basis}"
    say(f"{len(runs) - len(missing)} of {len(runs)} runs are recorded; the rest takes {rest}")
    return missing


def tell(runs: Sequence[CellRun], failures: Mapping[str, str]) -> int:
    """Say how many runs are recorded and why others are not; return the exit code."""
    failed = {run.label: failures[run.label] for run in runs if run.label in failures and not run.done}
    done = sum(run.done for run in runs)
    say(f"{done} of {len(runs)} runs are recorded" + ("" if done == len(runs) else "; the same command resumes"))
    for label, reason in failed.items():
        complain(f"{label} failed: {reason}")
    return 1 if failed else 0


def check_inputs(runs: Sequence[CellRun], options: RunOptions, out: Path) -> dict[str, str]:
    """Check the folder and the data sets before any run begins; return label -> reason of runs without data."""
    check_run_files(out, Path(os.path.realpath(out)))
    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        raise UserError(f"--out must be a writable folder, {out} is not")
    lost: dict[str, str] = {}
    for dataset in dict.fromkeys(run.cell.dataset for run in runs):
        of_it = [run for run in runs if run.cell.dataset == dataset]
        try:
            options.load(of_it[0].config().dataset, options.data_dir)
        except UserError as error:
            lost |= {run.label: str(error) for run in of_it}
            if len(lost) == len(runs):
                raise
    return lost


def run_iterations(args: argparse.Namespace, out: Path, budget: Budget) -> int:
    """Record the accuracy after every iteration, for the cells of the paper's figure."""
    cells = tables.select(iterations.CELLS, args.cells)
    last = min(CellRun(cell, 0, out, args.epochs).config().total_epochs for cell in cells)
    if wrong := [epoch for epoch in args.at if not 1 <= epoch <= last]:
        raise UserError(f"--at must be within epochs 1 to {last}, got {wrong[0]}")
    wanted = [trace for trace in iterations.choose_traces(out, cells, args.at, args.epochs) if not trace.file.exists()]
    if args.dry_run:
        for trace in wanted:
            say(f"{trace.run.label} epoch {trace.epoch}: {trace.training}")
        return 0
    options, shown, takes = run_options(args, cells), console(), 0.0
    for trace in wanted:
        begun = time.monotonic()
        try:
            if not budget.allows(takes):
                raise Stopped
            iterations.record_trace(
                trace, options, budget, progress_lines(shown, trace.run.label, trace.run.config().total_epochs)
            )
        except Stopped:
            say("the budget is spent; the same command resumes")
            return 0
        takes = time.monotonic() - begun
        say(f"wrote {trace.file}")
    return 0
