"""The command line, ``dcil-runtime`` or ``python -m dcil_runtime``: what is in a plan, how fast it is, how to link.

Wrong input gives one line on standard error and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from dcil_runtime import __version__, bench, contents
from dcil_runtime.format import PlanError
from dcil_runtime.native import HERE, LIBRARY, NativeMissing
from dcil_runtime.plan import Plan, load

EXIT_FAILED, EXIT_WRONG_INPUT, EXIT_INTERRUPTED = 1, 2, 130


class Parser(argparse.ArgumentParser):
    """Complain in one line, without the usage."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ValueError(message)


def main(words: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    try:
        sys.stdout.write(run(sys.argv[1:] if words is None else words))
        sys.stdout.flush()
        return 0
    except BrokenPipeError:  # a reader such as head may stop reading
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        return complain("interrupted", EXIT_INTERRUPTED)
    except OSError as error:
        return complain(f"{error.filename or 'standard output'}: {error.strerror or error}", EXIT_WRONG_INPUT)
    except MemoryError:
        return complain("memory does not suffice", EXIT_FAILED)
    except (PlanError, NativeMissing, ValueError) as error:
        return complain(str(error), EXIT_WRONG_INPUT)


def complain(text: str, code: int) -> int:
    sys.stderr.write(f"dcil-runtime: {text}\n")
    return code


def run(words: Sequence[str]) -> str:
    """Return what the command that ``words`` are prints."""
    chosen = parser().parse_args(words)
    if chosen.cflags or chosen.libs:
        return " ".join([*CFLAGS] * chosen.cflags + [*LIBS] * chosen.libs) + "\n"
    if not chosen.command:
        raise ValueError("a command must be given: info FILE or bench FILE (--help says more)")
    plan = opened(chosen)
    if chosen.command == "info":
        return contents.as_json(plan) if chosen.json else contents.as_text(chosen.file, plan)
    found = [bench.measure(plan, batch, chosen.seconds) for batch in chosen.batch]
    if chosen.json:
        return json.dumps({"isa": plan.isa, "threads": plan.threads, "batches": found}) + "\n"
    steps = [f"\nbatch {batch}:\n{plan.describe(batch)}" for batch in chosen.batch if chosen.steps]
    return bench.as_text(chosen.file, plan, found) + "".join(steps)


#: The flags of a compiler and a linker for C and C++ programs.
CFLAGS = (f"-I{HERE / 'include'}",)
LIBS = (str(LIBRARY), f"-Wl,-rpath,{HERE}")


def opened(chosen: argparse.Namespace) -> Plan:
    if chosen.command == "info":
        return load(chosen.file, isa=chosen.isa, tune_seconds=0)
    if not chosen.seconds > 0:
        raise ValueError(f"--seconds must be > 0, got {chosen.seconds}")
    if not chosen.tune_seconds >= 0:
        raise ValueError(f"--tune-seconds must be >= 0, got {chosen.tune_seconds}")
    return load(chosen.file, chosen.threads, chosen.isa, chosen.tune_seconds)


def batches(text: str) -> list[int]:
    """Return the sizes in a list such as 1,64."""
    if not all(word.isascii() and word.isdigit() and 0 < int(word) < 1 << 20 for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"must be numbers from 1 on, such as 1,64, got {text!r}")
    return [int(word) for word in text.split(",")]


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="dcil-runtime", description="Inspect and time CPU plans; they are written by dcil.")
    top.add_argument("--version", action="version", version=f"dcil-runtime {__version__}")
    top.add_argument("--cflags", action="store_true", help="print the compiler's flags for C and C++ programs")
    top.add_argument("--libs", action="store_true", help="print the linker's flags for them")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    info = commands.add_parser("info", help="print what is in a plan")
    timing = commands.add_parser("bench", help="measure how long a plan takes on this machine")
    for command in info, timing:
        command.add_argument("file", help="a plan")
        command.add_argument("--isa", default="", help="the kernels: avx512, avx2, neon, portable; default: the best")
        command.add_argument("--json", action="store_true", help="print JSON")
    timing.add_argument("--batch", type=batches, default=[1], help="how many images at once; a list such as 1,64")
    timing.add_argument("--threads", type=int, default=1, help="how many threads share a call")
    timing.add_argument("--seconds", type=float, default=3.0, help="how long each batch size is measured")
    timing.add_argument("--tune-seconds", type=float, default=1.5, help="how long each arrangement is tuned before")
    timing.add_argument("--steps", action="store_true", help="also print the time of each step")
    return top
