"""The run report: table, figures and details of any number of runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from dcil.errors import UserError
from dcil.report import run_figures, run_table, search, tradeoffs
from dcil.report.experiments import experiments
from dcil.report.measure import ACCURACY, LOSS, measures_of
from dcil.report.page import Block, Details, Heading, Paragraph, Table, TableRow, html
from dcil.report.theme import Style, styles
from dcil.runs.outputs import write_output_text
from dcil.runs.printable import printable
from dcil.runs.read import RecordedRun

MEASURED = {
    ACCURACY: "Accuracy is top-1 on the test set, in percent, of the pruned network. ",
    LOSS: (
        "Of a text the loss is the mean cross-entropy of the tokens that validate, in nats, of the pruned network: "
        "lower is better. **Bits/byte** is the same per byte of the text, whatever its tokens are, and **Top-1** the "
        "percentage of next tokens that are predicted right. "
    ),
}
LEAD = (
    "**Last** is the final epoch, the number to "
    "compare; **Best** was picked by looking at the test data, so it flatters. **Std** is the spread over the last "
    "tenth of the epochs: high means the last epoch was a matter of luck. **vs dense** is Last minus the mean of the "
    "dense runs of the same model and data. **Kept** counts the prunable weights that are left, "
    "**Multiply-adds** those for one image or sequence that are not with a zero, and **File** is the least size of a "
    "file without the zeros. Rows that say “mean ± std (n)” sum up n runs that differ only in their seed."
)


def write(runs: Sequence[RecordedRun], out: Path, waiting: Sequence[Path] = (), refresh: int | None = None) -> None:
    """Write the report of ``runs`` to the HTML file ``out``, atomically; those in ``waiting`` are not begun yet."""
    out = Path(out)
    if out.is_dir():
        raise UserError(f"{out} is a folder: give the report a file name, such as {out / 'report.html'}")
    write_output_text(out, html(title(runs), blocks(runs, waiting), refresh))


def blocks(runs: Sequence[RecordedRun], waiting: Sequence[Path] = ()) -> list[Block]:
    """Return the contents of the page."""
    page: list[Block] = [Heading(title(runs), 1)]
    if waiting:
        page.append(Paragraph(f"Waiting for {', '.join(printable(str(folder)) for folder in waiting)}."))
    if not runs:
        return page
    found = experiments(runs)
    style = styles([one.label for one in found])
    look = {run.label: style[one.label] for one in found for run in one.runs}
    page += [Paragraph("".join(MEASURED[measure] for measure in measures_of(runs)) + LEAD), table(runs, look)]
    page += search.blocks(runs)
    for picture in (*tradeoffs.pictures(found, style), *run_figures.pictures(found, style)):
        page += [Heading(picture.title), picture]
    return [*page, Heading("Runs in detail"), *(details(run, look[run.label]) for run in runs)]


def title(runs: Sequence[RecordedRun]) -> str:
    """Name the model and the data set if all runs share them, else count the tasks."""
    tasks = {run.task for run in runs}
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    if len(tasks) != 1:
        return f"{count} on {len(tasks)} tasks" if tasks else "No run has begun yet"
    return f"{runs[0].model} on {runs[0].dataset}: {count}"


def table(runs: Sequence[RecordedRun], look: Mapping[str, Style]) -> Table:
    """Return the table of runs; a row of one run shows its line style."""
    rows = run_table.rows(runs)
    shown = run_table.telling(rows)

    def to_html(row: run_table.RunRow) -> TableRow:
        cells = run_table.cells(row)
        texts = tuple(cells[index] for index in shown)
        if row.n > 1:
            return TableRow(texts, "mean", status=row.status)
        return TableRow(texts, style=look[row.label], status=row.status)

    first_number = sum(index < run_table.FIRST_NUMBER for index in shown)
    return Table(tuple(run_table.HEADINGS[index] for index in shown), tuple(map(to_html, rows)), first_number)


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
