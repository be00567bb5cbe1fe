"""The command `dcil bench infer`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from dcil import models
from dcil.bench import infer
from dcil.commands.parser import Parser, number, say, whole
from dcil.errors import UserError, unknown
from dcil.train import RunFolder
from dcil.train.environment import environment


def bench_infer(words: Sequence[str]) -> int:
    args = _parser().parse(words)
    if args.semi_structured:
        return _semi(args)
    if (args.run is None) == (args.model is None):
        raise UserError("give a run folder or --model NAME, one of the two")
    forms, shape, name = _from_run(args.run) if args.run else _from_model(args)
    if args.onnx and not all(importlib.util.find_spec(m) for m in ("onnx", "onnxscript", "onnxruntime")):
        raise UserError("the ONNX Runtime forms need pip install 'dcil[onnx]'; --no-onnx leaves them out")
    timings = infer.measure(forms, shape, args.threads, args.batch, args.rounds, args.onnx)
    counts = forms.counts(shape)
    where = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if args.json:
        record = {"network": name, "counts": counts, "timings": infer.records(timings), "environment": where}
        say(json.dumps(record, indent=1))
        return 0
    console = Console()
    console.print(infer.table(timings))
    for form, count in counts.items():
        console.print(f"{form}: {count['parameters']:,} parameters, {count['macs']:,} multiply-adds", highlight=False)
    console.print("; ".join(f"{k} {v}" for k, v in where.items()), highlight=False)
    return 0


def _parser() -> Parser:
    parser = Parser("dcil bench infer", infer.__doc__)
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--model", default=None, help="a network by name, pruned at random, instead of a run")
    parser.add_argument(
        "--sparsity", type=number, default=0.8, help="with --model: fraction pruned in every layer (0.8)"
    )
    parser.add_argument("--granularity", default="filter", help="with --model: filter (default) or weight")
    parser.add_argument("--size", type=whole, default=None, help="with --model: image size (32, or 224 for ImageNet's)")
    parser.add_argument("--threads", type=_counts, default=(1, 2), help="CPU threads, with commas between them (1,2)")
    parser.add_argument("--batch", type=_counts, default=(1, 64), help="images per call, with commas (1,64)")
    parser.add_argument("--rounds", type=whole, default=15, help="timed calls of each form (15)")
    parser.add_argument("--onnx", action=argparse.BooleanOptionalAction, default=True, help="ONNX Runtime forms too")
    parser.add_argument("--semi-structured", action="store_true", help="2:4 Linear layers on the GPU by size, instead")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    return parser


def _counts(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 1,64") from None
    if not all(n >= 1 for n in found):
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1")
    return found


def _from_run(path: Path) -> tuple[infer.Forms, list[int], str]:
    folder = RunFolder(path)
    net = folder.load()
    shape: list[int] = folder.record()["shape"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # dead layers are what is measured here
        masked = net.finalize()
    return infer.forms_of(net.model, masked, shape), shape, str(path)


def _from_model(args: argparse.Namespace) -> tuple[infer.Forms, list[int], str]:
    if args.granularity not in ("filter", "weight"):
        raise unknown("granularity", args.granularity, ("filter", "weight"))
    if not 0 <= args.sparsity < 1:
        raise UserError(f"--sparsity {args.sparsity} cannot work; it is at least 0 and below 1")
    torch.manual_seed(0)
    dense = models.build(args.model)
    prune = infer.prune_filters if args.granularity == "filter" else infer.prune_weights
    size = args.size or (224 if args.model in ("resnet18", "resnet34", "resnet50") else 32)
    shape = [3, size, size]
    name = f"{args.model}, {args.sparsity:.0%} of every layer by {args.granularity}"
    return infer.forms_of(dense, prune(dense, args.sparsity), shape), shape, name


def _semi(args: argparse.Namespace) -> int:
    timings = infer.measure_semi((256, 512, 1024, 2048, 4096, 8192), args.batch, args.rounds, torch.float16)
    if args.json:
        say(json.dumps([asdict(timing) for timing in timings], indent=1))
    else:
        Console().print(infer.semi_table(timings))
    return 0
