"""From run folders to one self-contained HTML page, and to a table in the terminal.

Reading order: `runs` (a folder becomes a `Run`), `table` (runs become rows), `figures` (runs become SVG), `page`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dcil.report import table
from dcil.report.runs import Run, read, read_all
from dcil.runs.summary import Summary, summarise

__all__ = ["Run", "Summary", "build", "read", "read_all", "summarise", "table"]


def build(runs: Sequence[Path], out: Path) -> None:
    """Write the report of the given run folders to the HTML file `out`, all of it or nothing."""
    from dcil.report import page  # here, because matplotlib takes a second to load

    page.write(read_all(runs), out)
