"""The paper's tables: train what is missing of one, list it, or build the page that compares all of them.

TABLE is a table's name, the beginning of names, several with commas, or all; "iterations" is the paper's figure of
the accuracy after every iteration. The same command again goes on where it was stopped."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from rich.console import Console

from dcil import data
from dcil.cli.parser import Parser, device, epochs, positive, say
from dcil.cli.train import add_engine_options, engine_settings
from dcil.engine.process_group import alone
from dcil.errors import UserError
from dcil.report.formatting import duration
from dcil.reproduce import iterations, records, tables
from dcil.reproduce.estimate import Estimate
from dcil.reproduce.pool import Budget, Pool
from dcil.reproduce.session import Run, RunOptions
from dcil.runs.environment import environment, hardware
from dcil.runs.progress import progress_lines
from dcil.train.memory import keep_freed_memory
from dcil.train.parallel import GPU_RUNS, Stopped, runs_at_once

UNITS = {"s": 1, "m": 60, "h": 3600}


def main(words: Sequence[str]) -> int:
    alone("dcil reproduce")
    parser = Parser("dcil reproduce", __doc__)
    add_options(parser)
    args = parser.parse(words)
    budget = Budget.of(args.budget)
    if args.list:
        list_tables()
        return 0
    out = args.out / f"trial-{args.epochs}" if args.epochs else args.out
    code = 0
    if args.table == "iterations":
        code = look_closely(args, out, budget)
    elif args.table is not None:
        code = run_tables(args, out, budget)
    elif not args.report:
        raise UserError(f"which table? One of {', '.join(tables.names())}, iterations, all; or --report")
    if args.report:
        from dcil.reproduce import report  # here, because matplotlib takes a second to load

        docs = args.docs or (out / "docs" if args.epochs else Path("docs"))
        for file in report.build(out, docs, args.epochs):
            say(f"wrote {file}")
    return code


def add_options(parser: Parser) -> None:
    parser.add_argument("table", nargs="?", metavar="TABLE", help="which (see --list)")
    parser.add_argument("--cells", metavar="FILTER", help="only these: words of their names, or patterns with *")
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help="runs per cell, seeds 0 to N-1 (3)")
    parser.add_argument("--budget", type=seconds, metavar="TIME", help="stop in time, between epochs: 25m, 2h, 90s")
    parser.add_argument("--parallel", type=positive, metavar="N", help=f"runs at once ({GPU_RUNS} on a GPU, else 1)")
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="DIR", help="records and runs (results)")
    parser.add_argument("--docs", type=Path, metavar="DIR", help="where --report writes (docs)")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="where data sets are")
    parser.add_argument("--device", type=device, default="auto", help="cpu, cuda, … or auto: cuda where there is one")
    parser.add_argument("--epochs", type=positive, metavar="N", help="a trial: shortened runs, in their own folder")
    parser.add_argument("--at", type=epochs, default=iterations.EPOCHS, metavar="A,…", help="epochs of iterations")
    parser.add_argument("--tidy", action="store_true", help="remove the working folder of a run once it is recorded")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and their estimated time; train nothing")
    parser.add_argument("--report", action="store_true", help="build the page from the records there are then")
    parser.add_argument("--list", action="store_true", help="the tables and how many cells they have")
    add_engine_options(parser)


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 25m, 2h or 90s")
    return float(match[1]) * UNITS[match[2] or "s"]


def list_tables() -> None:
    for name in tables.names():
        say(f"{name:28} {len(tables.cells_of(name)):3} cells")
    say(f"{'iterations':28} {len(iterations.CELLS):3} cells: accuracy after every iteration of an epoch")


def place_of(args: argparse.Namespace) -> RunOptions:
    at_once = runs_at_once(args.parallel, args.device)
    speed = replace(engine_settings(args), shared_gpu=at_once > 1)
    return RunOptions(args.data_dir, args.device, speed, at_once, cache(data.load))


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160)  # a log has no width to wrap at


def run_tables(args: argparse.Namespace, out: Path, budget: Budget) -> int:
    """Train what has no record yet, cheapest first."""
    cells = tables.cells(tables.named(args.table), args.cells)
    runs = [Run(cell, seed, out, args.epochs) for cell in cells for seed in range(args.seeds)]
    place = place_of(args)
    estimate = Estimate(records.read_all(out), place.at_once, hardware(environment(args.device)))
    left = {run: estimate.left(run) for run in runs if not run.done}
    missing = sorted(left, key=lambda run: (left[run], run.seed))
    if args.dry_run:
        for run in missing:
            say(f"{run.label:60} {duration(left[run]):>12}")
    done = len(runs) - len(missing)
    if not missing:
        say(f"all {done} runs are recorded")
        return 0
    rest = f"about {duration(sum(left.values()) / place.at_once)}, {place.at_once} at once{estimate.basis}"
    say(f"{done} of {len(runs)} runs are recorded; the rest takes {rest}")
    if args.dry_run:
        return 0
    lost = check_place(missing, place, out)
    keep_freed_memory()
    pool = Pool(place, budget, console(), args.tidy, iterations.snapshots)
    failures = lost | pool.run([run for run in missing if run.label not in lost], estimate.per_epoch)
    failures = {run.label: failures[run.label] for run in missing if run.label in failures and not run.done}
    done = sum(run.done for run in runs)
    say(f"{done} of {len(runs)} runs are recorded" + ("" if done == len(runs) else "; the same command goes on"))
    for label, reason in failures.items():
        sys.stderr.write(f"dcil: {label} failed: {reason}\n")
    return 1 if failures else 0


def check_place(runs: Sequence[Run], place: RunOptions, out: Path) -> dict[str, str]:
    """Whatever would stop every run is said once, before any begins; label -> why, of those whose data is not there."""
    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        raise UserError(f"--out {out} cannot be written to")
    lost: dict[str, str] = {}
    for dataset in dict.fromkeys(run.cell.dataset for run in runs):
        of_it = [run for run in runs if run.cell.dataset == dataset]
        try:
            place.load(of_it[0].config().dataset, place.data_dir)
        except UserError as error:
            lost |= {run.label: str(error) for run in of_it}
            if len(lost) == len(runs):
                raise
    return lost


def look_closely(args: argparse.Namespace, out: Path, budget: Budget) -> int:
    """Accuracy after every iteration, for the cells of the paper's figure."""
    cells = tables.select(iterations.CELLS, args.cells)
    last = min(Run(cell, 0, out, args.epochs).config().total_epochs for cell in cells)
    if wrong := [epoch for epoch in args.at if not 1 <= epoch <= last]:
        raise UserError(f"--at {wrong[0]}: there are epochs 1 to {last}")
    wanted = [look for look in iterations.looks(out, cells, args.at, args.epochs) if not look.file.exists()]
    if args.dry_run:
        for look in wanted:
            say(f"{look.run.label} epoch {look.epoch}: {look.needs}")
        return 0
    place, shown, takes = place_of(args), console(), 0.0
    for look in wanted:
        begun = time.monotonic()
        try:
            if not budget.allows(takes):
                raise Stopped
            iterations.look(look, place, budget, progress_lines(shown, look.run.label, look.run.config().total_epochs))
        except Stopped:
            say("the budget is spent; the same command goes on")
            return 0
        takes = time.monotonic() - begun
        say(f"wrote {look.file}")
    return 0
