"""Reports: run folders as one HTML page or a table in the terminal, and the toolkit that all pages are made with.

The toolkit: `formatting` (number formats), `page` (blocks, rendered as Markdown and HTML), `theme` (the look of
figures). The run report: `experiments` (seeds of the same settings), `run_table` (rows), `run_figures` and `tradeoffs`,
`run_report` (the page), `watch` (rebuilds it). Drawing needs ``dcil[report]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dcil.report import run_table
from dcil.runs.read import RecordedRun, read_run, read_runs
from dcil.runs.summary import Summary, summarise

__all__ = ["RecordedRun", "Summary", "build", "read_run", "read_runs", "run_table", "summarise", "write"]


def build(runs: Sequence[Path], out: Path) -> None:
    """Write the report of the given run folders to the HTML file ``out``, atomically."""
    write(read_runs(runs), out)


def write(runs: Sequence[RecordedRun], out: Path, waiting: Sequence[Path] = (), refresh: int | None = None) -> None:
    """Write the report of runs that are already read; see ``run_report.write``."""
    from dcil.report import run_report  # here: it needs matplotlib, which is optional and takes a second to load

    run_report.write(runs, out, waiting, refresh)
