"""The report as one HTML file: no script, no request to anywhere, all text escaped."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from dcil.errors import UserError
from dcil.report import figures, table
from dcil.runs.read import RecordedRun

GLYPHS = {"s": "■", "^": "▲", "D": "◆", "v": "▼"}


def write(runs: Sequence[RecordedRun], out: Path) -> None:
    """Write the page to `out` by way of a file beside it, so that a reader never sees half a page."""
    out = Path(out)
    if out.is_dir():
        raise UserError(f"{out} is a folder: give the report a file name, such as {out / 'report.html'}")
    html = render(runs)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _replace(out, html)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error


def _replace(out: Path, text: str) -> None:
    draft = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, out)
    finally:
        draft.unlink(missing_ok=True)


def render(runs: Sequence[RecordedRun]) -> str:
    """The page as text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["json"] = lambda value: json.dumps(value, indent=2, ensure_ascii=False)
    source = resources.files("dcil.report").joinpath("template.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(
        title=title(runs),
        runs=runs,
        rows=[(row, table.cells(row)) for row in table.rows(runs)],
        headings=table.HEADINGS,
        first_number=table.FIRST_NUMBER,
        pictures=figures.pictures(runs),
        styles=figures.styles(runs),
        glyphs=GLYPHS,
        notes={run.label: notes(run) for run in runs},
        svg=Markup,
    )


def title(runs: Sequence[RecordedRun]) -> str:
    """What was run, if it was all the same; else how much."""
    tasks = {(run.model, run.dataset) for run in runs}
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    if len(tasks) > 1:
        return f"{count} on {len(tasks)} tasks"
    model, dataset = tasks.pop()
    return f"{model} on {dataset}: {count}"


def notes(run: RecordedRun) -> list[str]:
    """What a reader of this run's numbers should know."""
    found = [f"{run.status}; its numbers are those so far"] if run.status else []
    return [*found, *run.notes]
