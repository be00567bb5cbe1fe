"""Time inference: the command `dcil bench infer`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dcil import models
from dcil.bench import cpu, infer, semi
from dcil.cli import bench_engines
from dcil.cli.parser import Parser, each_up_to, filepath, number, say, up_to
from dcil.errors import UserError, unknown
from dcil.runs.environment import environment
from dcil.train import RunFolder
from dcil.train.restore import config_of, load_net


def bench_infer(words: Sequence[str]) -> int:
    args = _parser().parse(words)
    if args.semi_structured:
        return _semi(args)
    if bool(args.run) == (args.model is not None):
        raise UserError("give a run folder or --model NAME, one of the two")
    if args.model is not None and not (args.masks or args.forms):
        raise UserError("--model with --no-forms needs --masks: without them nothing is timed")
    for fraction in args.sparsity:
        if not 0 <= fraction < 1:
            raise UserError(f"--sparsity must be >= 0 and < 1, got {fraction}")
    named = (args.model or "").split(",") if args.forms else []
    check_images([*(config_of(RunFolder(run)).model for run in args.run), *named])
    records = bench_engines.compare(args) if args.run or args.masks else []
    if args.masks or not args.forms or len(args.run) > 1:
        if args.json:
            say(json.dumps({"machine": cpu.machine(), "cases": records}, indent=1))
        return 0
    _forms(args, args.run[0] if args.run else None, records)
    return 0


def check_images(names: Sequence[str]) -> None:
    """Refuse networks that read tokens: what is timed gets images."""
    if found := [name for name in names if models.reads_tokens(name)]:
        raise UserError(
            f"dcil bench infer times networks of images, got {found[0]}, which reads tokens "
            "(choose another, or compare engines by --model, --masks and --no-forms)"
        )


def _forms(args: argparse.Namespace, run: Path | None, engines: list[dict[str, Any]]) -> None:
    """The dense, masked and compact network."""
    forms, shape, name = _from_run(run) if run else _from_model(args)
    if args.onnx and not all(importlib.util.find_spec(m) for m in ("onnx", "onnxscript", "onnxruntime")):
        raise UserError("the ONNX Runtime forms need pip install 'dcil[onnx]'; --no-onnx leaves them out")
    timings = infer.measure(forms, shape, args.threads, args.batch or (1, 64), args.rounds or 15, args.onnx)
    counts = forms.counts(shape)
    where = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if args.json:
        record = {"network": name, "counts": counts, "timings": infer.records(timings), "environment": where}
        say(json.dumps({**record, "engines": engines} if engines else record, indent=1))
        return
    console = Console()
    console.print(infer.table(timings))
    for form, count in counts.items():
        console.print(f"{form}: {count['parameters']:,} parameters, {count['macs']:,} multiply-adds", highlight=False)
    console.print("; ".join(f"{k} {v}" for k, v in where.items()), highlight=False)


def _parser() -> Parser:
    parser = Parser("dcil bench infer", f"{cpu.__doc__}\n{infer.__doc__}")
    parser.add_argument("run", nargs="*", type=filepath, metavar="RUN", help="run folders")
    parser.add_argument("--model", default=None, help="network by name (with --masks: several, comma-separated)")
    parser.add_argument(
        "--sparsity", type=_fractions, default=(0.8,), help="with --model: fraction pruned (0.8; with --masks: several)"
    )
    bench_engines.add_arguments(parser)
    parser.add_argument(
        "--forms", action=argparse.BooleanOptionalAction, default=True, help="also time the compact network (one run)"
    )
    parser.add_argument("--granularity", default="filter", help="with --model: filter (default) or weight")
    parser.add_argument(
        "--size", type=up_to(4096), default=None, help="with --model: image size (32; ImageNet models: 224)"
    )
    parser.add_argument("--threads", type=each_up_to(1024), default=(1, 2), help="CPU threads, comma-separated (1,2)")
    parser.add_argument("--batch", type=each_up_to(65536), default=None, help="images per call, comma-separated (1,64)")
    parser.add_argument(
        "--rounds", type=up_to(10_000), default=None, help="timed calls of each engine (7) or form (15)"
    )
    parser.add_argument("--onnx", action=argparse.BooleanOptionalAction, default=True, help="also time ONNX Runtime")
    parser.add_argument("--semi-structured", action="store_true", help="time 2:4 Linear layers on the GPU instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    return parser


def _fractions(text: str) -> tuple[float, ...]:
    return tuple(number(part) for part in text.split(","))


def _from_run(path: Path) -> tuple[infer.Forms, list[int], str]:
    folder = RunFolder(path)
    net = load_net(folder)
    shape: list[int] = folder.record()["shape"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # dead layers are what is measured here
        masked = net.finalize()
    return infer.forms_of(net.model, masked, shape), shape, str(path)


def _from_model(args: argparse.Namespace) -> tuple[infer.Forms, list[int], str]:
    if args.granularity not in ("filter", "weight"):
        raise unknown("granularity", args.granularity, ("filter", "weight"))
    if len(args.sparsity) > 1:
        raise UserError("several sparsities need --masks")
    sparsity = args.sparsity[0]
    torch.manual_seed(0)
    dense = models.build(args.model)
    prune = infer.prune_filters if args.granularity == "filter" else infer.prune_weights
    size = args.size or cpu.image_size(args.model)
    shape = [3, size, size]
    bench_engines.check_pixels(args.batch or (1, 64), shape)
    name = f"{args.model}, {sparsity:.0%} of every layer by {args.granularity}"
    return infer.forms_of(dense, prune(dense, sparsity), shape), shape, name


def _semi(args: argparse.Namespace) -> int:
    timings = semi.measure_semi(semi.SHAPES, args.batch or semi.BATCHES, args.rounds or 7)
    where = environment(torch.device("cuda"))
    if args.json:
        record = {"timings": [asdict(t) for t in timings], "verdict": semi.verdict(timings), "environment": where}
        say(json.dumps(record, indent=1))
        return 0
    console = Console()
    console.print(semi.semi_table(timings))
    for line in semi.verdict(timings):
        console.print(line, highlight=False)
    console.print("; ".join(f"{k} {v}" for k, v in where.items()), highlight=False)
    return 0
