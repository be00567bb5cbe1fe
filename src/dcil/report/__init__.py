"""From run folders to one self-contained HTML page, and to a table in the terminal.

Reading order: `dcil.runs.read` (a folder becomes a `RecordedRun`), `table` (runs become rows), `figures` (runs become
SVG), `page`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dcil.report import table
from dcil.runs.read import RecordedRun, read_run, read_runs
from dcil.runs.summary import Summary, summarise

__all__ = ["RecordedRun", "Summary", "build", "read_run", "read_runs", "summarise", "table"]


def build(runs: Sequence[Path], out: Path) -> None:
    """Write the report of the given run folders to the HTML file `out`, all of it or nothing."""
    from dcil.report import page  # here, because matplotlib takes a second to load

    page.write(read_runs(runs), out)
