"""Compare any number of runs: a table in the terminal, and tables and figures as one HTML file, once or, with --watch,
while they are going."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dcil import report
from dcil.cli.parser import Parser, filepath, say, up_to
from dcil.errors import MissingExtra
from dcil.report.watch import watch
from dcil.runs.outputs import check_output


def main(words: Sequence[str]) -> int:
    parser = Parser("dcil report", __doc__)
    parser.add_argument("runs", nargs="+", type=filepath, metavar="RUN", help="run folders")
    parser.add_argument("--out", type=filepath, default=Path("report.html"), metavar="FILE", help="HTML file to write")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=seconds,
        const=5,
        metavar="SECONDS",
        help="rebuild the file while the runs are going, looking for news every so many seconds (5)",
    )
    args = parser.parse(words)
    check_output(args.out)
    # A pattern such as runs/* also matches the HTML report beside the runs.
    folders = [run for run in args.runs if not run.is_file()] or args.runs
    if args.watch is not None:
        say(f"watching {len(folders)} run{'s' if len(folders) > 1 else ''}: {args.out} is rebuilt when there is news")
        sys.stdout.flush()
        runs = watch(folders, args.out, args.watch)
        print_table(runs)
        say(f"report: {args.out}")
        return 0
    runs = report.read_runs(folders)
    print_table(runs)
    write(runs, args.out)
    return 0


def seconds(text: str) -> int:
    """Read the seconds of --watch; a run folder right behind the option is taken for them."""
    try:
        return up_to(86_400)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error} (the run folders go before --watch)") from None


def show(folders: Sequence[Path], out: Path) -> None:
    """Print the table of finished runs and write their report, or name the extra that the report needs."""
    runs = report.read_runs(folders)
    print_table(runs)
    try:
        write(runs, out)
    except MissingExtra as error:
        say(f"no HTML report: {error}")


def print_table(runs: Sequence[report.RecordedRun]) -> None:
    Console().print(report.run_table.to_rich(report.run_table.rows(runs)))


def write(runs: Sequence[report.RecordedRun], out: Path) -> None:
    report.write(runs, out)
    say(f"report: {out}")
