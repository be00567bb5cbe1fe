"""Train a network with one pruning method, or with several for a comparison. --recipe sets every option; options given
beside it take precedence."""

from __future__ import annotations

import argparse
import dataclasses
import os
import typing
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dcil import METHODS, data
from dcil.cli import report
from dcil.cli.parser import (
    DATA_DIR,
    DATA_DIR_HELP,
    Parser,
    add_damaged,
    device,
    filepath,
    minutes,
    pair,
    run_path,
    say,
    value_reader,
)
from dcil.data import Loaded
from dcil.engine.process_group import restarts
from dcil.engine.settings import ENGINES, PRECISIONS, EngineSettings
from dcil.runs.printable import quoted
from dcil.runs.progress import progress_bar
from dcil.train import Config, ProcessGroup, train
from dcil.train.event_log import check_log, event_log
from dcil.train.memory import keep_freed_memory
from dcil.train.plan import REPORT, PlannedRun, plan_comparison

FIELDS = {field.name: field for field in dataclasses.fields(Config)}


def main(words: Sequence[str]) -> int:
    group = ProcessGroup.from_environment(os.environ)
    with group.reporting_errors_once():
        args = read(words)
        check_log(args.log)
        args.resume |= restarts(os.environ) > 0  # the same command goes on with its run
        base, runs = plan_comparison(options_of(args), args.recipe, args.out, args.resume)
        for run in runs:
            if args.resume and not run.folder.started:
                say(f"no run in {run.folder.path} yet: starting it")
        group = replace(group, local_norms=args.local_norms, shard=args.shard)
        settings = engine_settings(args)
        device = group.device(args.device)
    keep_freed_memory()
    console = Console()
    logged = args.log is not None and group.is_rank_zero
    if logged:
        say(f"live:   tensorboard --logdir {quoted(base)}")
    with group.connected(device):
        for run in runs:
            train_one(console, run, args, device, settings, group, logged)
    if group.is_rank_zero:
        finish(base, [run.folder.path for run in runs], args.data_dir)
    return 0


def read(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser("dcil train", __doc__)
    add_options(parser)
    parser.add_argument("--log", metavar="NAME", help="tensorboard: write every epoch's numbers to RUN/tensorboard")
    parser.add_argument(
        "--local-norms",
        action="store_true",
        help="under torchrun: do not synchronise batch norms between processes",
    )
    parser.add_argument(
        "--shard",
        action="store_true",
        help="under torchrun: each process holds its part of the weights, the optimizer's state and the masks (FSDP2)",
    )
    parser.add_argument(
        "--check-images",
        choices=data.CHECKS,
        default="ends",
        help="before a run begins, name images that cannot be read, by header and end of the file (ends), by decoding "
        "all, or not (none)",
    )
    add_damaged(parser)
    return parser.parse(words)


def add_options(parser: Parser) -> None:
    """Add an option for every field of Config, and where and how to run."""
    parser.add_argument("--recipe", metavar="NAME", help="named recipe to start from (see: dcil list)")
    hints = typing.get_type_hints(Config)
    for name, field in FIELDS.items():
        if name != "settings":
            default = field.default
            if isinstance(default, tuple):  # as it is typed
                default = ",".join(map(str, default))
            parser.add_argument(
                f"--{name.replace('_', '-')}",
                dest=name,
                type=value_reader(hints[name]),
                default=argparse.SUPPRESS,
                metavar=name.upper(),
                help=f"{field.metadata['help']} (digits recipe: {default})",
            )
    settings = FIELDS["settings"].metadata["help"]
    parser.add_argument(
        "--set", dest="settings", type=pair, action="append", default=argparse.SUPPRESS, metavar="N=V", help=settings
    )
    parser.add_argument("--out", type=run_path, metavar="RUN", help="run folder; with several runs their parent folder")
    parser.add_argument("--data-dir", type=filepath, default=DATA_DIR, metavar="DIR", help=DATA_DIR_HELP)
    parser.add_argument("--device", type=device, default="auto", help="cpu, cuda, cuda:N or auto (cuda if available)")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument(
        "--checkpoint-minutes",
        type=minutes,
        default=10.0,
        metavar="M",
        help="within an epoch, write a checkpoint when the last one is so old (10; 0: at the ends of epochs alone)",
    )
    add_engine_options(parser)


def add_engine_options(parser: Parser) -> None:
    """Add the options that change the speed and not the result: they are not part of the config."""
    parser.add_argument("--engine", default="auto", help=f"{', '.join(ENGINES)} (auto: graph on CUDA, else eager)")
    parser.add_argument("--precision", default="auto", help=f"{', '.join(PRECISIONS)} (auto: bf16 on CUDA, else fp32)")
    parser.add_argument(
        "--low-memory", action="store_true", help="keep one path's activations at a time: less memory, slower steps"
    )


def engine_settings(args: argparse.Namespace) -> EngineSettings:
    return EngineSettings(args.engine, args.precision, args.low_memory)


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of Config that were given."""
    options = {name: getattr(args, name) for name in FIELDS if hasattr(args, name)}
    return options | ({"settings": dict(options["settings"])} if "settings" in options else {})


def train_one(
    console: Console,
    run: PlannedRun,
    args: argparse.Namespace,
    device: torch.device,
    settings: EngineSettings,
    group: ProcessGroup,
    logged: bool,
) -> None:
    config = run.config
    label = f"{config.method} {config.sparsity:g}" if METHODS[config.method].prunes else config.method
    try:
        with ExitStack() as stack:
            progress = stack.enter_context(progress_bar(console, f"{label:12}", config.total_epochs))
            if logged:
                progress = stack.enter_context(event_log(run.folder.path, progress))
            summary = train(
                config,
                run.folder,
                args.data_dir,
                device,
                progress,
                settings,
                group=group,
                resume=args.resume,
                checkpoint_minutes=args.checkpoint_minutes,
                check=image_check(args, run, device, group),
            )
    except KeyboardInterrupt:
        # Not through the console: interrupted in the middle of a line, rich keeps what follows to itself.
        say(f"stopped; to continue: the same command with --resume (run: {run.folder.path})")
        raise
    for note in summary.get("notes", []):
        say(f"note: {note}")


def image_check(
    args: argparse.Namespace, run: PlannedRun, device: torch.device, group: ProcessGroup
) -> Callable[[Loaded], Loaded]:
    """Return how images are checked before a run begins: on each machine, every process looks at its part of them."""

    def check(loaded: Loaded) -> Loaded:
        if not isinstance(loaded, data.ImageFolder):
            return loaded
        if args.check_images != "none" and group.decided(not run.folder.started, device):
            part = group.local_rank, group.local_world_size
            found = group.gathered(data.find_damaged(loaded, args.check_images == "all", *part))
            if args.damaged == "fatal":
                data.refuse_damaged(found)
            for reason in found:
                say(f"left out: {reason}")
        return data.skipping(loaded, args.damaged == "skip")

    return check


def finish(base: Path, runs: Sequence[Path], data_dir: Path) -> None:
    """Print the table, write the report, and name the next commands."""
    report.show(runs, base / REPORT)
    say(f"runs:   {', '.join(map(quoted, runs))}")
    shown = quoted(next((run for run in runs if run.name == "dcil"), runs[-1]))
    where = "" if data_dir == DATA_DIR else f" --data-dir {quoted(data_dir)}"
    say(f"next:   dcil eval {shown}{where}")
    say(f"        dcil export {shown} --to safetensors --out pnet.safetensors")
