"""What was not run yet, folded away, with the time that it is estimated to take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dcil.report.formatting import duration
from dcil.report.page import Folded, Paragraph, Table
from dcil.reproduce.cells import Cell
from dcil.reproduce.estimate import GUESSED, Estimate
from dcil.reproduce.session import CellRun

NOTE = (
    "Estimated for one seed of each from the epoch times of the records: of the same network where there are "
    "any{guess}. `dcil reproduce {table} --dry-run` estimates it for the machine it runs on."
)


def folded(
    what: str, table: str, missing: Sequence[Cell], shown: Table, estimate: Estimate, trial: int | None
) -> Folded:
    """Return the rows of cells without a run under one line that says how many there are and how long they take."""
    paces = [estimate.pace(CellRun(cell, 0, Path(), trial)) for cell in missing]
    seconds = sum(estimate.seconds(CellRun(cell, 0, Path(), trial)) for cell in missing)
    cells = f"{len(missing)} cell{'s' * (len(missing) != 1)}"
    summary = f"{what}: {cells} not run, about {duration(seconds)} of one GPU"
    guess = "" if all(pace.hardware != GUESSED for pace in paces) else ", otherwise a guess for an H200"
    return Folded(summary, (Paragraph(NOTE.format(guess=guess, table=table)), shown))
