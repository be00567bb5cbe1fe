"""The run report: table, figures and details of any number of runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from dcil.errors import UserError
from dcil.report import run_figures, run_table
from dcil.report.page import Block, Details, Heading, Paragraph, Table, TableRow, html
from dcil.report.theme import Style, styles
from dcil.runs.outputs import write_output_text
from dcil.runs.read import RecordedRun

LEAD = (
    "Accuracy is top-1 on the test set, in percent, of the pruned network. **Last** is the final epoch, the number to "
    "compare; **Best** was picked by looking at the test set, so it flatters. **Std** is the spread over the last "
    "tenth of the epochs: high means the last epoch was a matter of luck. **vs dense** is Last minus the mean of the "
    "dense runs of the same model and data set, in points. **Kept** counts the prunable weights that are left. Rows "
    "that say “mean ± std (n)” sum up n runs that differ only in their seed."
)


def write(runs: Sequence[RecordedRun], out: Path) -> None:
    """Write the report of ``runs`` to the HTML file ``out``, atomically."""
    out = Path(out)
    if out.is_dir():
        raise UserError(f"{out} is a folder: give the report a file name, such as {out / 'report.html'}")
    write_output_text(out, html(title(runs), blocks(runs)))


def blocks(runs: Sequence[RecordedRun]) -> list[Block]:
    """Return the contents of the page."""
    style = styles([run.label for run in runs])
    page: list[Block] = [Heading(title(runs), 1), Paragraph(LEAD), table(runs, style)]
    for picture in run_figures.pictures(runs, style):
        page += [Heading(picture.title), picture]
    return [*page, Heading("Runs in detail"), *(details(run, style[run.label]) for run in runs)]


def title(runs: Sequence[RecordedRun]) -> str:
    """Name the model and the data set if all runs share them, else count the tasks."""
    tasks = {(run.model, run.dataset) for run in runs}
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    if len(tasks) > 1:
        return f"{count} on {len(tasks)} tasks"
    model, dataset = tasks.pop()
    return f"{model} on {dataset}: {count}"


def table(runs: Sequence[RecordedRun], style: Mapping[str, Style]) -> Table:
    """Return the table of runs; a row of one run shows its line style."""
    rows = (
        TableRow(run_table.cells(row), "mean", status=row.status)
        if row.n > 1
        else TableRow(run_table.cells(row), style=style[row.label], status=row.status)
        for row in run_table.rows(runs)
    )
    return Table(run_table.HEADINGS, tuple(rows), run_table.FIRST_NUMBER)


def details(run: RecordedRun, style: Style) -> Details:
    """Return notes, environment and configuration of one run."""
    notes = [*([f"{run.status}; its numbers are those so far"] if run.status else []), *run.notes]
    sections: dict[str, str | Sequence[str] | Mapping[str, str]] = {
        "Notes": notes,
        "Environment": run.environment,
        "Configuration, every field": json.dumps(run.config, indent=2, ensure_ascii=False),
    }
    badge = f"{len(notes)} note{'s' if len(notes) > 1 else ''}" if notes else ""
    return Details(run.label, {heading: content for heading, content in sections.items() if content}, badge, style)
