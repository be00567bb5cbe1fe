"""The options of `dcil export` for int8, and the images that it calibrates on."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from dcil import data, models
from dcil.cli.parser import DATA_DIR, DATA_DIR_HELP, Parser, add_damaged, filepath, say, up_to, value_reader
from dcil.data.batches import Batch
from dcil.errors import UserError
from dcil.export import Written, export_int8
from dcil.export.int8 import BOUND
from dcil.train import RunFolder
from dcil.train.building import describe_data
from dcil.train.restore import check_data, config_of

#: Images computed at once where top-1 is measured.
BATCH = 64


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--calibrate", type=up_to(1 << 16), default=None, metavar="N", help="int8: training images to calibrate on"
    )
    help = f"int8: points of top-1 it may cost without a remark ({BOUND})"
    parser.add_argument("--bound", type=value_reader(float), metavar="POINTS", help=help)
    parser.add_argument("--data-dir", type=filepath, metavar="DIR", help=f"int8: {DATA_DIR_HELP}")
    add_damaged(parser, default=None, only="int8: ")


def is_wanted(args: argparse.Namespace) -> bool:
    """Return whether the export is one in int8; refuse options that do not go together."""
    for name in ("calibrate", "bound", "data_dir", "damaged"):
        if args.dtype != "int8" and getattr(args, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} goes with --to cpu --dtype int8 only (drop it)")
    if args.dtype == "int8" and args.to != "cpu":
        raise UserError(f"--dtype int8 goes with --to cpu only, got --to {args.to}")
    if args.dtype == "int8" and args.calibrate is None:
        raise UserError("--dtype int8 needs images to calibrate on: give --calibrate N, such as 256")
    if args.bound is not None and not args.bound >= 0:  # NaN would let every loss pass
        raise UserError(f"--bound must be >= 0, got {args.bound} (points of top-1)")
    return bool(args.dtype == "int8")


def write_int8(args: argparse.Namespace, folder: RunFolder, model: nn.Module, notes: Mapping[str, str]) -> Written:
    """Write the plan and print what int8 changes."""
    images, test = calibration_images(folder, args.calibrate, args.data_dir or DATA_DIR, args.damaged == "skip")
    written, change = export_int8(model, args.out, images, test, notes)
    for line in change.lines(BOUND if args.bound is None else args.bound):
        say(line)
    return written


def calibration_images(folder: RunFolder, count: int, data_dir: Path, skip: bool) -> tuple[Tensor, Iterator[Batch]]:
    """Return training images of a run, augmented as in its first epoch, and its test batches.

    skip   leave images out that cannot be read
    """
    config = config_of(folder)
    if models.reads_tokens(config.model):
        raise UserError(f"int8 is for networks of images, got {config.model}, which reads tokens (export it in fp32)")
    dataset = data.prepare(data.skipping(data.load(config.dataset, data_dir), skip), config.tokens, config.length)
    check_data(folder, describe_data(dataset))
    if count > dataset.train_size:
        raise UserError(f"--calibrate must be at most the {dataset.train_size} training images, got {count}")
    batches = dataset.loader(min(BATCH, dataset.train_size), torch.device("cpu"), config.seed)
    images: list[Tensor] = []
    for x, _ in batches.train(0):
        images.append(x)
        if sum(map(len, images)) >= count:
            break
    return torch.cat(images)[:count].contiguous(), batches.test()
