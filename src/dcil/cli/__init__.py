"""The command line. Wrong input ends in one line on standard error and exit code 2, before anything is written."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from dcil.errors import UserError, unknown

#: Command -> the module of dcil.cli that does it, loaded when it is asked for, and what it does.
COMMANDS = {
    "train": ("train", "train a network, with one method or with several in comparison"),
    "sweep": ("sweep", "train many networks, several at once on a GPU"),
    "eval": ("eval", "accuracy of both paths, sparsity and cost of a run"),
    "reproduce": ("reproduce", "the paper's tables, cell by cell, against the paper's numbers"),
    "report": ("report", "tables and pictures of any number of runs, as one HTML file"),
    "export": ("export", "the finished pruned net as a file"),
    "list": ("list", "methods, models, data sets and recipes"),
    "bench": ("bench", "benchmarks that print ratios side by side"),
}
BRIEF = ("eval", "report", "export", "list")
EXIT_FAILED, EXIT_WRONG_INPUT, EXIT_INTERRUPTED = 1, 2, 130


def main(words: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    words = sys.argv[1:] if words is None else words
    try:
        return run(words)
    except UserError as error:
        sys.stderr.write(f"dcil: {' '.join(str(error).split())}\n")
        return error.exit_code
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output has gone
            sys.stderr.close()
            return EXIT_FAILED
        sys.stderr.write(f"dcil: {error.filename or ''}: {error.strerror or error}\n")
        return EXIT_WRONG_INPUT
    except KeyboardInterrupt:
        sys.stderr.write("dcil: interrupted\n")
        return EXIT_INTERRUPTED


def run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(usage())
        return 0 if words else EXIT_WRONG_INPUT
    if words[0] == "--version":
        from dcil import __version__

        sys.stdout.write(f"dcil {__version__}\n")
        return 0
    if words[0] not in COMMANDS:
        raise unknown("command", words[0], COMMANDS)
    module, _ = COMMANDS[words[0]]
    with uncollected() if words[0] in BRIEF else nullcontext():
        code: int = importlib.import_module(f"dcil.cli.{module}").main(words[1:])
    return code


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection: torch imports objects by the million, and looking through them all again and again takes
    a quarter of the time of a command that lasts seconds."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def usage() -> str:
    lines = "\n".join(f"  {name:9} {help}" for name, (_, help) in COMMANDS.items())
    return f"usage: dcil COMMAND …\n\n{lines}\n\ndcil COMMAND --help tells more.\n"


if __name__ == "__main__":
    sys.exit(main())
