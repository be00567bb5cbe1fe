"""The command line. Wrong input gives one line on standard error and exit code 2, before anything is written."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from dcil.cli import interrupts, streams
from dcil.errors import UserError, unknown

#: Command -> its module in dcil.cli, imported when it is run, and its help text.
COMMANDS = {
    "train": ("train", "train a network with one method, or with several for a comparison"),
    "sweep": ("sweep", "train many networks, several at once on a GPU"),
    "eval": ("eval", "print accuracy of both paths, sparsity and cost of a run"),
    "reproduce": ("reproduce", "reproduce the paper's tables, cell by cell, against its numbers"),
    "report": ("report", "write tables and figures of runs to one HTML file"),
    "export": ("export", "write the pruned network of a run to a file"),
    "list": ("list", "list methods, models, data sets and recipes"),
    "bench": ("bench", "run benchmarks and print ratios"),
}
#: Commands that last seconds.
SHORT = ("eval", "report", "export", "list")
EXIT_FAILED, EXIT_WRONG_INPUT, EXIT_INTERRUPTED = 1, 2, 130


def main(words: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    streams.prepare()
    if words is None:  # the process is this command's own
        interrupts.listen()
    code = attempt(sys.argv[1:] if words is None else words)
    error = streams.flush()
    if error is None or code:
        return code
    if not isinstance(error, BrokenPipeError):  # a reader such as head may stop reading
        streams.complain(f"standard output: {error.strerror}")
    return EXIT_FAILED


def attempt(words: Sequence[str]) -> int:
    """Run a command; what is wrong with its input or the machine becomes one line and an exit code."""
    try:
        return run(words)
    except UserError as error:
        streams.complain(str(error))
        return error.exit_code
    except BrokenPipeError:  # the reader of standard output has closed it
        streams.discard(sys.stdout)
        return EXIT_FAILED
    except OSError as error:
        # What writes to files names them, so a failed write without a name is most likely the output's.
        unnamed = "standard output" if error.errno in streams.WRITE_ERRORS else "the system"
        streams.complain(f"{unnamed if error.filename is None else error.filename}: {error.strerror or error}")
        return EXIT_WRONG_INPUT
    except RecursionError:
        streams.complain("the model, or a file, is nested too deeply to be read; choose a smaller one")
        return EXIT_FAILED
    except (MemoryError, RuntimeError) as error:  # torch reports either way
        from dcil.train.out_of_memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        streams.complain("memory does not suffice; a smaller --batch or model needs less")
        return EXIT_FAILED
    except KeyboardInterrupt:
        streams.complain("interrupted")
        return EXIT_INTERRUPTED
    except SystemExit as stop:  # argparse after --help, rich after a broken pipe
        return stop.code if isinstance(stop.code, int) else EXIT_FAILED if stop.code else 0


def run(words: Sequence[str]) -> int:
    """Run the command that ``words`` names."""
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
    with no_garbage_collection() if words[0] in SHORT else nullcontext():
        code: int = importlib.import_module(f"dcil.cli.{module}").main(words[1:])
    return code


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection for short commands: it takes a quarter of their time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def usage() -> str:
    """Return the list of commands."""
    lines = "\n".join(f"  {name:9} {help}" for name, (_, help) in COMMANDS.items())
    return f"usage: dcil COMMAND …\n\n{lines}\n\ndcil COMMAND --help lists the options of a command.\n"


if __name__ == "__main__":
    sys.exit(main())
