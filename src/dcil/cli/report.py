"""Tables and pictures of any number of runs, as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dcil import report
from dcil.cli.parser import Parser, say


def main(words: Sequence[str]) -> int:
    parser = Parser("dcil report", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="the file to write")
    args = parser.parse(words)
    # runs/* also finds the page of a comparison, which lies beside its runs.
    show([run for run in args.runs if not run.is_file()] or args.runs, args.out)
    return 0


def show(runs: Sequence[Path], out: Path) -> None:
    """Write the page, print the table."""
    report.build(runs, out)
    Console().print(report.table.to_rich(report.table.rows(report.read_runs(runs))))
    say(f"report: {out}")
