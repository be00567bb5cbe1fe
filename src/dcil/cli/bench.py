"""Benchmarks that print ratios side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dcil.bench import step, train
from dcil.cli.bench_infer import bench_infer
from dcil.cli.parser import Parser, device, each_up_to, filepath, up_to
from dcil.errors import UserError, unknown
from dcil.runs.outputs import check_output


def bench_step(words: Sequence[str]) -> int:
    parser = Parser("dcil bench step", step.__doc__)
    parser.add_argument("--models", default="resnet20,wrn-28-2", help="models, with commas between them")
    parser.add_argument("--batch", type=up_to(65536), default=128, help="images per step (128)")
    parser.add_argument("--rounds", type=up_to(10_000), default=9, help="timed steps of each (9)")
    args = parser.parse(words)
    step.run(args.models.split(","), args.batch, args.rounds)
    return 0


def bench_train(words: Sequence[str]) -> int:
    parser = Parser("dcil bench train", train.__doc__)
    parser.add_argument("--models", default="resnet20", help=f"of {', '.join(train.CASES)}, with commas between them")
    parser.add_argument(
        "--parallel", type=each_up_to(64), default=(1, 2, 4, 8), help="numbers of runs at once (1,2,4,8)"
    )
    parser.add_argument("--precision", default="auto", help="fp32, tf32 or bf16 (auto: bf16 on CUDA)")
    parser.add_argument(
        "--baseline",
        default="",
        metavar="MODELS",
        help="for these also a plain torch loop: eager, torch.compile, CUDA graphs",
    )
    parser.add_argument("--device", type=device, default="auto", help="cpu, cuda, … or auto: cuda where there is one")
    parser.add_argument("--out", type=filepath, default=Path("benchmarks/train.json"), help="JSON of all numbers")
    args = parser.parse(words)
    check_output(args.out)
    for name in args.models.split(","):
        if name not in train.CASES:
            raise unknown("model", name, train.CASES)
    if args.device.type != "cuda" and not any(word.startswith("--device") for word in words):
        raise UserError("dcil bench train is for a GPU, and there is none; dcil bench step times steps on the CPU")
    train.run(args.models.split(","), args.parallel, args.precision, args.baseline.split(","), args.device, args.out)
    return 0


BENCHMARKS: dict[str, Callable[[Sequence[str]], int]] = {
    "step": bench_step,
    "train": bench_train,
    "infer": bench_infer,
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
