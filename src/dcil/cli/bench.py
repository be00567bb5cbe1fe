"""Benchmarks that print ratios side by side."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from dcil.bench import image_input, loops, step, train
from dcil.cli.bench_infer import bench_infer
from dcil.cli.bench_shard import bench_shard
from dcil.cli.parser import Parser, device, each_up_to, filepath, number, up_to
from dcil.errors import UserError, unknown
from dcil.runs.outputs import check_output


def bench_step(words: Sequence[str]) -> int:
    parser = Parser("dcil bench step", step.__doc__)
    parser.add_argument("--models", default="resnet20,gpt-6-384", help="models, with commas between them")
    parser.add_argument("--batch", type=up_to(65536), default=128, help="images per step (128)")
    parser.add_argument("--sequences", type=up_to(4096), default=4, help="of 256 tokens, per step of a GPT (4)")
    parser.add_argument("--rounds", type=up_to(10_000), default=9, help="timed steps of each (9)")
    args = parser.parse(words)
    step.run(args.models.split(","), args.batch, args.sequences, args.rounds)
    return 0


def bench_train(words: Sequence[str]) -> int:
    parser = Parser("dcil bench train", train.__doc__)
    parser.add_argument("--models", default=None, help="models, with commas between them (resnet20; own loops: all)")
    parser.add_argument(
        "--loop",
        choices=("dcil", "own"),
        default="dcil",
        help="dcil: what `dcil train` does; own: a loop by hand in torch, compiled, and with dcil.make_step",
    )
    parser.add_argument(
        "--parallel", type=numbers_of_runs, default=(1, 2, 4, 8), help="numbers of runs at once, or none (1,2,4,8)"
    )
    parser.add_argument("--shares", type=shares, default=(1.0,), help="values of DCIL's super_share, as 1,0.25 (1)")
    parser.add_argument("--engines", default="eager,graph", help="which engines (eager,graph)")
    parser.add_argument("--precision", default="auto", help="fp32, tf32 or bf16 (auto: bf16 on CUDA)")
    parser.add_argument("--loops", default=",".join(loops.ALL), help="with --loop own: which (all)")
    parser.add_argument("--calls", type=up_to(10_000), default=32, help="with --loop own: steps of a round (32)")
    parser.add_argument("--device", type=device, default="auto", help="cpu, cuda, … or auto: cuda where there is one")
    parser.add_argument("--out", type=filepath, default=Path("benchmarks/train.json"), help="JSON of all numbers")
    args = parser.parse(words)
    check_output(args.out)
    cases = loops.CASES if args.loop == "own" else train.CASES
    names = args.models.split(",") if args.models else list(cases) if args.loop == "own" else ["resnet20"]
    chosen, engines = args.loops.split(","), args.engines.split(",")
    allowed_names = (("model", names, cases), ("loop", chosen, loops.ALL), ("engine", engines, ("eager", "graph")))
    for kind, given, allowed in allowed_names:
        for name in given:
            if name not in allowed:
                raise unknown(kind, name, allowed)
    if args.device.type != "cuda" and not any(word.startswith("--device") for word in words):
        raise UserError("dcil bench train is for a GPU, and there is none; dcil bench step times steps on the CPU")
    if args.loop == "own":
        loops.run(names, chosen, args.device, args.out, args.calls, rounds=5)
    else:
        train.run(names, args.parallel, args.shares, engines, args.precision, args.device, args.out)
    return 0


def bench_images(words: Sequence[str]) -> int:
    parser = Parser("dcil bench images", image_input.__doc__)
    parser.add_argument("--data-dir", type=filepath, default=None, metavar="DIR", help="images as for imagefolder")
    parser.add_argument("--batch", type=up_to(65536), default=64, help="images of a batch (64)")
    parser.add_argument("--workers", type=up_to(256), default=2, help="processes that decode (2)")
    parser.add_argument("--rounds", type=up_to(1000), default=3, help="epochs of each loader (3)")
    parser.add_argument("--out", type=filepath, default=None, help="write all numbers to this JSON file")
    args = parser.parse(words)
    if args.out is not None:
        check_output(args.out)
    image_input.run(args.data_dir, args.batch, args.workers, args.rounds, args.out)
    return 0


def bench_grid(words: Sequence[str]) -> int:
    parser = Parser(
        "dcil bench grid", "Time what a grid costs besides training: 1,000 trivial runs on a local Ray cluster."
    )
    parser.add_argument("--runs", type=up_to(100_000), default=1000, help="runs on Ray (1000)")
    parser.add_argument("--out", type=filepath, default=Path("benchmarks/grid.json"), help="JSON of all numbers")
    args = parser.parse(words)
    check_output(args.out)
    from dcil.bench import grid  # here: Ray need not be installed

    grid.run(args.runs, args.out)
    return 0


def numbers_of_runs(text: str) -> tuple[int, ...]:
    """Read comma-separated numbers of runs, or none."""
    return () if text == "none" else each_up_to(64)(text)


def shares(text: str) -> tuple[float, ...]:
    """Read comma-separated shares of a batch."""
    found = tuple(map(number, text.split(",")))
    if not all(0 < share <= 1 for share in found):
        raise argparse.ArgumentTypeError(f"must be > 0 and <= 1, got {text}")
    return found


BENCHMARKS: dict[str, Callable[[Sequence[str]], int]] = {
    "step": bench_step,
    "train": bench_train,
    "infer": bench_infer,
    "shard": bench_shard,
    "images": bench_images,
    "grid": bench_grid,
}


def main(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        parser = Parser("dcil bench", __doc__)
        parser.add_argument("benchmark", help=f"which one: {', '.join(BENCHMARKS)}")
        parser.print_help()
        return 0 if words else 2
    if words[0] not in BENCHMARKS:
        raise unknown("benchmark", words[0], BENCHMARKS)
    return BENCHMARKS[words[0]](words[1:])
