"""Grids on Ray: the options of sweep and reproduce, the cluster, and the runs as Ray's tasks."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from dcil import data
from dcil.cli.parser import Parser, device, say, up_to
from dcil.engine import EngineSettings
from dcil.errors import UserError
from dcil.reproduce import remote_cells
from dcil.reproduce.estimate import rough_seconds
from dcil.reproduce.session import CellRun, RunOptions
from dcil.train import remote_runs
from dcil.train.budget import Budget
from dcil.train.parallel import runs_at_once
from dcil.train.plan import PlannedRun
from dcil.train.remote_runs import Place

if TYPE_CHECKING:
    from dcil.integrations.ray_cluster import Share


def add_options(parser: Parser) -> None:
    parser.add_argument(
        "--on",
        type=address,
        metavar="ray[:ADDRESS]",
        help="train on a Ray cluster: ray (RAY_ADDRESS, else one started on this machine), ray:auto or ray:HOST:PORT",
    )
    parser.add_argument("--cpus", type=up_to(1024), metavar="N", help="with --on: CPUs and threads of a run (1)")
    parser.read_later("--device")  # that of the cluster may not be here


def check(args: argparse.Namespace) -> None:
    """Refuse --cpus without --on; read --device, which is of this machine or with --on of the cluster."""
    if args.on is not None:
        args.device = device_there(args.device)
        return
    if args.cpus is not None:
        raise UserError("--cpus is for --on; here OMP_NUM_THREADS=N sets the threads")
    try:
        args.device = device(args.device)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"--device {error}") from None


def device_there(name: str) -> torch.device | None:
    """Read --device of a cluster, which need not be one of this machine; None: what the cluster has."""
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device must be auto, cpu or cuda with --on, got {name} (Ray gives each run its GPU)")
    return None if name == "auto" else torch.device(name)


def address(text: str) -> str:
    """Read --on: an empty text where no address is given."""
    name, colon, found = text.partition(":")
    if name != "ray" or (colon and not found):
        raise argparse.ArgumentTypeError(f"must be ray or ray:ADDRESS, got {text!r}")
    return found


@contextmanager
def cluster(args: argparse.Namespace, models: Iterable[str]) -> Iterator[Share]:
    """Connect to the cluster of --on, or start it; decide --device and yield what a run takes."""
    from dcil.integrations import ray_cluster  # here: Ray takes a second to import, and need not be installed

    given, cpus = args.device, args.cpus or 1
    on_cpus = given is not None and given.type == "cpu"
    local = cpus * args.parallel if args.parallel and (on_cpus or not torch.cuda.is_available()) else None
    with ray_cluster.connected(args.on, local):
        args.device = given or ray_cluster.device_of_cluster()
        if args.device.type == "cuda":
            share = ray_cluster.Share(cpus, 1 / runs_at_once(args.parallel, args.device, models))
        else:
            share = ray_cluster.Share(cpus, at_most=args.parallel)
        if not ray_cluster.is_possible(share):
            say(f"no node has the {share.described} that a run takes: waiting for one")
        yield share


def capacity(share: Share) -> int:
    """Return how many runs the cluster trains at once as it is now."""
    from dcil.integrations.ray_cluster import capacity

    return capacity(share)


def sweep(
    console: Console,
    runs: Sequence[PlannedRun],
    args: argparse.Namespace,
    share: Share,
    settings: EngineSettings,
    budget: Budget,
) -> dict[str, str]:
    """Train the runs of a sweep, cheapest first; return the reason for each that failed, by name."""
    from dcil.integrations.ray import Job, run_on_ray

    for dataset in dict.fromkeys(run.config.dataset for run in runs):
        data.load(dataset, args.data_dir)  # what is missing is downloaded here, not by all workers at once
    place = Place(args.data_dir, args.device.type, settings)
    jobs = [
        Job(
            run.name,
            run.folder,
            run.config.total_epochs,
            remote_runs.train_text,
            remote_runs.to_text(run, place, args.checkpoint_minutes),
        )
        for run in sorted(runs, key=lambda run: rough_seconds(run.config))
        if run.folder.summary() is None
    ]
    return run_on_ray(jobs, args.out, share, budget, console)


def reproduce(
    console: Console,
    runs: Sequence[CellRun],
    out: Path,
    options: RunOptions,
    share: Share,
    budget: Budget,
    tidy: bool,
) -> dict[str, str]:
    """Train runs of cells in their order; return the reason for each that failed, by label."""
    from dcil.integrations.ray import Job, run_on_ray

    jobs = [
        Job(
            run.label,
            run.folder,
            run.config().total_epochs,
            remote_cells.train_text,
            remote_cells.to_text(run, options, tidy),
        )
        for run in runs
    ]
    return run_on_ray(jobs, out, share, budget, console)
