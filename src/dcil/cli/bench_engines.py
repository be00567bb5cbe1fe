"""Compare inference engines: a part of `dcil bench infer`."""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dcil.bench import cpu
from dcil.bench.engines import DENSE, INT8, SPARSE
from dcil.cli.parser import Parser, filepath
from dcil.errors import UserError, unknown
from dcil.runs.outputs import check_output
from dcil.train import RunFolder
from dcil.train.restore import config_of, load_net

#: The most pixels of a batch: the first layer's output then has 4 GB.
MAX_PIXELS = 2**26
EVERY = [*SPARSE, *DENSE, *INT8]
#: A name, networks by what their masks are called, the shape of an image.
Net = tuple[str, dict[str, torch.nn.Module], tuple[int, ...]]


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--masks", default=None, help="with --model: compare engines with random masks: uniform, erk")
    parser.add_argument(
        "--engines", default=",".join(EVERY), help=f"engines, comma-separated (all): {', '.join(EVERY)}"
    )
    parser.add_argument("--out", type=filepath, default=None, help="write the engines' times to this JSON file")


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every engine on every network, batch and thread count; print tables unless --json is given."""
    if args.out:
        check_output(args.out)
    engines = args.engines.split(",")
    for name in engines:
        if name not in EVERY:
            raise unknown("engine", name, EVERY)
    nets = [trained(run) for run in args.run] if args.run else list(random(args.model, args.masks, args.sparsity))
    for _, _, shape in nets:
        check_pixels(args.batch or (1, 64), shape)
    cases = [
        cpu.Case(name, models, cpu.inputs(shape, batch), threads)
        for name, models, shape in nets
        for batch in args.batch or (1, 64)
        for threads in args.threads
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the other engines' exporters warn a lot
        return cpu.run(cases, engines, args.rounds or 7, args.out, show=not args.json)


def check_pixels(batches: Sequence[int], shape: Sequence[int]) -> None:
    """Refuse a batch of images that would take all memory."""
    if (pixels := max(batches) * math.prod(shape[1:])) > MAX_PIXELS:
        raise UserError(f"--batch and --size must give at most {MAX_PIXELS:,} pixels per call, got {pixels:,}")


def trained(run: Path) -> Net:
    folder = RunFolder(run)
    net, config = load_net(folder), config_of(folder)
    shape = tuple(folder.record()["shape"])
    return config.model, {f"{config.method} {net.sparsity:.3f}": net.finalize().eval()}, shape


def random(models: str, masks: str, sparsity: Sequence[float]) -> Iterator[Net]:
    for kind in masks.split(","):
        if kind not in cpu.SCOPES:
            raise unknown("masks", kind, cpu.SCOPES)
    for name in models.split(","):
        pairs = [(kind, fraction) for kind in masks.split(",") for fraction in sparsity]
        yield name, {f"{kind} {s:g}": cpu.masked(name, kind, s) for kind, s in pairs}, cpu.input_shape(name)
