"""Compare any number of runs: a table in the terminal, and tables and figures as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dcil import report
from dcil.cli.parser import Parser, filepath, say
from dcil.errors import MissingExtra
from dcil.runs.outputs import check_output


def main(words: Sequence[str]) -> int:
    parser = Parser("dcil report", __doc__)
    parser.add_argument("runs", nargs="+", type=filepath, metavar="RUN", help="run folders")
    parser.add_argument("--out", type=filepath, default=Path("report.html"), metavar="FILE", help="HTML file to write")
    args = parser.parse(words)
    check_output(args.out)
    # A pattern such as runs/* also matches the HTML report beside the runs.
    runs = report.read_runs([run for run in args.runs if not run.is_file()] or args.runs)
    print_table(runs)
    write(runs, args.out)
    return 0


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
