"""dcil bench cpu: sparse networks on this CPU against dense engines."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from dcil.bench import cpu
from dcil.bench.engines import DENSE, INT8, SPARSE
from dcil.commands.parser import Parser, whole
from dcil.errors import UserError, unknown
from dcil.train import RunFolder


def bench_cpu(words: Sequence[str]) -> int:
    parser = Parser("dcil bench cpu", cpu.__doc__)
    parser.add_argument("--models", default="resnet20,wrn-28-2", help="models, with commas (resnet20,wrn-28-2)")
    parser.add_argument("--runs", type=Path, nargs="*", default=[], help="run folders: their own masks instead")
    parser.add_argument("--masks", default="uniform,erk", help="random masks: uniform, erk, with commas")
    parser.add_argument("--sparsity", default="0.9,0.95,0.99", help="fractions, with commas (0.9,0.95,0.99)")
    parser.add_argument("--batch", default="1,64", help="batch sizes, with commas (1,64)")
    parser.add_argument("--threads", default="1", help="thread counts, with commas (1)")
    every = [*SPARSE, *DENSE, *INT8]
    parser.add_argument("--engines", default=",".join(every), help=f"with commas: {', '.join(every)}")
    parser.add_argument("--rounds", type=whole, default=7, help="turns of each engine (7)")
    parser.add_argument("--out", type=Path, help="write everything to this JSON file")
    args = parser.parse(words)
    engines = args.engines.split(",")
    for name in engines:
        if name not in every:
            raise unknown("engine", name, every)
    if args.rounds < 1:
        raise UserError(f"--rounds {args.rounds}: at least 1")
    warnings.filterwarnings("ignore")  # the other engines' exporters talk a lot
    nets = list(trained(args.runs)) if args.runs else list(random(args.models, args.masks, args.sparsity))
    cases = [
        cpu.Case(name, masks, model, torch.randn(batch, *shape), threads)
        for name, masks, model, shape in nets
        for batch in numbers(args.batch)
        for threads in numbers(args.threads)
    ]
    cpu.run(cases, engines, args.rounds, args.out)
    return 0


Net = tuple[str, str, torch.nn.Module, tuple[int, ...]]


def trained(runs: Sequence[Path]) -> Iterator[Net]:
    for run in runs:
        folder = RunFolder(run)
        net, config = folder.load(), folder.config()
        yield (
            config.model,
            f"{config.method} {net.sparsity:.3f}",
            net.finalize().eval(),
            tuple(folder.record()["shape"]),
        )


def random(models: str, masks: str, sparsity: str) -> Iterator[Net]:
    for name in models.split(","):
        for kind in masks.split(","):
            if kind not in ("uniform", "erk"):
                raise unknown("masks", kind, ("uniform", "erk"))
            for text in sparsity.split(","):
                size = cpu.image_size(name)
                yield name, f"{kind} {text}", cpu.masked(name, kind, fraction(text)), (3, size, size)


def numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise UserError(f"{text!r} is not a list of whole numbers such as 1,64")
    return found


def fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UserError(f"{text!r} is not a sparsity from 0 to 1")
    return value
