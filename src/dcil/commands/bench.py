"""Benchmarks that print ratios side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dcil.bench import step
from dcil.commands.parser import Parser, whole
from dcil.errors import unknown


def bench_step(words: Sequence[str]) -> int:
    parser = Parser("dcil bench step", step.__doc__)
    parser.add_argument("--models", default="resnet20,wrn-28-2", help="models, with commas between them")
    parser.add_argument("--batch", type=whole, default=128, help="images per step (128)")
    parser.add_argument("--rounds", type=whole, default=9, help="timed steps of each (9)")
    args = parser.parse(words)
    step.run(args.models.split(","), args.batch, args.rounds)
    return 0


BENCHMARKS: dict[str, Callable[[Sequence[str]], int]] = {"step": bench_step}


def main(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        parser = Parser("dcil bench", __doc__)
        parser.add_argument("benchmark", help=f"which one: {', '.join(BENCHMARKS)}")
        parser.print_help()
        return 0 if words else 2
    if words[0] not in BENCHMARKS:
        raise unknown("benchmark", words[0], BENCHMARKS)
    return BENCHMARKS[words[0]](words[1:])
