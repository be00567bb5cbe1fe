"""Compare inference engines: a part of `dcil bench infer`."""

from __future__ import annotations

import argparse
import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcil.bench import cpu
from dcil.bench.engines import DENSE, INT8, SPARSE
from dcil.cli.export_int8 import BATCH, calibration_images
from dcil.cli.parser import DATA_DIR, DATA_DIR_HELP, Parser, add_damaged, filepath, up_to
from dcil.errors import UserError, unknown
from dcil.runs.outputs import check_output
from dcil.train import RunFolder
from dcil.train.restore import config_of, load_net

#: The most pixels of a batch: the first layer's output then has 4 GB.
MAX_PIXELS = 2**26
EVERY = [*SPARSE, *DENSE, *INT8]
#: Images of noise that INT8 is calibrated on where there are no others, and test images for top-1.
NOISE, TEST = 2, 2048


@dataclass(frozen=True)
class Net:
    """A network to time."""

    name: str
    models: dict[str, torch.nn.Module]  # by what their masks are called
    shape: tuple[int, ...]
    images: Tensor  # that INT8 is calibrated on
    test: tuple[Tensor, Tensor] | None = None


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--masks", default=None, help="with --model: compare engines with random masks: uniform, erk")
    parser.add_argument(
        "--engines", default=",".join(EVERY), help=f"engines, comma-separated (all): {', '.join(EVERY)}"
    )
    parser.add_argument("--out", type=filepath, default=None, help="write the engines' times to this JSON file")
    help = "with RUN: calibrate INT8 on so many training images, and measure top-1 (default: on noise)"
    parser.add_argument("--calibrate", type=up_to(1 << 16), default=None, metavar="N", help=help)
    parser.add_argument("--data-dir", type=filepath, default=DATA_DIR, metavar="DIR", help=DATA_DIR_HELP)
    add_damaged(parser, only="with --calibrate: ")


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every engine on every network, batch and thread count; print tables unless --json is given."""
    if args.out:
        check_output(args.out)
    engines = args.engines.split(",")
    for name in engines:
        if name not in EVERY:
            raise unknown("engine", name, EVERY)
    if args.calibrate is not None and not args.run:
        raise UserError("--calibrate needs a RUN, whose images it takes (drop it: INT8 is then calibrated on noise)")
    nets = [trained(run, args) for run in args.run]
    nets = nets or list(random(args.model, args.masks, args.sparsity))
    for net in nets:
        check_pixels(args.batch or (1, 64), net.shape)
    cases = [
        cpu.Case(net.name, net.models, cpu.inputs(net.shape, batch), threads, net.images, net.test)
        for net in nets
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


def trained(run: Path, args: argparse.Namespace) -> Net:
    folder = RunFolder(run)
    net, config = load_net(folder), config_of(folder)
    shape = tuple(folder.record()["shape"])
    models = {f"{config.method} {net.sparsity:.3f}": net.finalize().eval()}
    if args.calibrate is None:
        return Net(config.model, models, shape, torch.randn(NOISE, *shape))
    images, batches = calibration_images(folder, args.calibrate, args.data_dir, args.damaged == "skip")
    x, y = zip(*itertools.islice(batches, TEST // BATCH), strict=True)
    return Net(config.model, models, shape, images, (torch.cat(x).contiguous(), torch.cat(y)))


def random(models: str, masks: str, sparsity: Sequence[float]) -> Iterator[Net]:
    for kind in masks.split(","):
        if kind not in cpu.SCOPES:
            raise unknown("masks", kind, cpu.SCOPES)
    for name in models.split(","):
        pairs = [(kind, fraction) for kind in masks.split(",") for fraction in sparsity]
        models_ = {f"{kind} {s:g}": cpu.masked(name, kind, s) for kind, s in pairs}
        shape = cpu.input_shape(name)
        yield Net(name, models_, shape, cpu.inputs(shape, NOISE))
