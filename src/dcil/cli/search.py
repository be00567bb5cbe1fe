"""dcil sweep --search: the options of a search, its plan, and what is said of it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from dcil import data
from dcil.cli import on_ray, report
from dcil.cli.parser import Parser, positive, say, up_to
from dcil.cli.streams import complain
from dcil.cli.train import engine_settings
from dcil.errors import UserError
from dcil.train.budget import Budget
from dcil.train.plan import REPORT, Options, check_parent
from dcil.train.remote_runs import Place
from dcil.train.search_record import COMPLETE, FAILED, STOPPED, SearchRecord
from dcil.train.search_space import Axis, check_space, combinations, config_with, parse_space

TRIALS, RUNGS = 16, 9


def add_options(parser: Parser) -> None:
    parser.add_argument(
        "--search",
        action="append",
        metavar="NAME=LOW..HIGH",
        help="draw an option, or a setting of the method, from LOW..HIGH, LOW..HIGH:log or A,B,C; on Ray, with ASHA",
    )
    parser.add_argument("--trials", type=up_to(100_000), metavar="N", help=f"with --search: runs ({TRIALS})")
    parser.add_argument(
        "--grace", type=positive, metavar="N", help="with --search: epochs before a run may be stopped (a ninth)"
    )


def check(args: argparse.Namespace) -> None:
    """Refuse options that only a search has."""
    for name in ("trials", "grace"):
        if not args.search and getattr(args, name) is not None:
            raise UserError(f"--{name} is for --search; drop it")


def run(console: Console, args: argparse.Namespace, options: Options, budget: Budget) -> int:
    """Search, print and report; return the exit code."""
    if args.on is None:
        raise UserError("--search runs on Ray: give --on ray as well, which starts a cluster on this machine")
    from dcil.integrations.ray_search import Search, search_on_ray  # here: Ray need not be installed

    space = parse_space(args.search, options)
    check_space(space, options, args.recipe)
    config = config_with({axis.name: axis.ends[0] for axis in space}, options, args.recipe)
    grace = args.grace or max(1, config.total_epochs // RUNGS)
    if grace > config.total_epochs:
        raise UserError(f"--grace must be at most the epochs of a run ({config.total_epochs}), got {grace}")
    check_parent(args.out)
    record = SearchRecord(
        {axis.name: text.partition("=")[2] for axis, text in zip(space, args.search, strict=True)},
        {"options": dict(options), "recipe": args.recipe},
        "val_loss" if config.dataset in data.TEXTS else "top1",
        grace,
    ).resume(args.out)
    data.load(config.dataset, args.data_dir)  # what is missing is downloaded here, not by all workers at once
    trials = max(how_many(args.trials or TRIALS, space), len(record.trials))
    with on_ray.cluster(args, {config.model}) as share:
        settings = replace(engine_settings(args), shared_gpu=0 < share.gpus < 1)
        place = Place(args.data_dir, args.device.type, settings)
        minutes = args.checkpoint_minutes
        search = Search(args.out, space, record, trials, config.total_epochs, config.seed, place, minutes)
        search_on_ray(search, share, budget, console)
    return tell(args, record)


def how_many(wanted: int, space: Sequence[Axis]) -> int:
    """Return the number of trials: no more than there are combinations, since more would repeat some."""
    found = min(wanted, combinations(space))
    if found < wanted:
        say(f"the lists have {found} combinations: as many trials, not {wanted}")
    return int(found)


def tell(args: argparse.Namespace, record: SearchRecord) -> int:
    """Report the trials that have begun and say how they ended."""
    folders = [args.out / trial.name for trial in record.trials]
    begun = [folder for folder in folders if (folder / "config.json").exists()]
    if begun:
        report.show(begun, args.out / REPORT)
    count = {ended: sum(trial.ended == ended for trial in record.trials) for ended in (COMPLETE, STOPPED, FAILED)}
    say(f"{len(record.trials)} trials: {count[COMPLETE]} complete, {count[STOPPED]} stopped early")
    for trial in record.trials:
        if trial.ended == FAILED:
            complain(f"{trial.name} failed: {trial.reason}")
    return 1 if count[FAILED] else 0
