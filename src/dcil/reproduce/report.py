"""The results page, as Markdown and HTML: the same records give the same bytes."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dcil.errors import UserError, unknown
from dcil.report.formatting import NONE, NOT_RUN, plus_minus, signed, spread
from dcil.report.page import Heading, MarkdownBlock, Paragraph, Picture, Table, TableRow, html, markdown
from dcil.reproduce import iterations, not_run, overview, records, sections, tables
from dcil.reproduce.comparison import COLUMNS, ComparisonRow, Measurements, comparison_rows
from dcil.reproduce.estimate import Estimate, cached_config
from dcil.reproduce.matching import matches_recipe
from dcil.reproduce.paper import PrintedNumber
from dcil.reproduce.record_fields import FINDINGS
from dcil.reproduce.records import Record
from dcil.reproduce.revisions import older_than
from dcil.runs.environment import hardware
from dcil.runs.json_file import parse_object, read_text
from dcil.runs.outputs import check_output, write_output_text

TITLE = "The paper's tables, reproduced"
TABLE_TITLES = {
    "cifar10-unstructured": "CIFAR-10, single weights",
    "cifar100-unstructured": "CIFAR-100, single weights",
    "cifar10-structured": "CIFAR-10, whole filters",
    "stability-cifar10": "Stability on CIFAR-10: the standard deviation over the last 10 % of epochs",
    "diff-cifar10-unstructured": "CIFAR-10, single weights: difference to dense",
    "diff-cifar10-structured": "CIFAR-10, whole filters: difference to dense",
    "cifar100-structured": "CIFAR-100, whole filters",
    "warmup-cifar10": "Epochs before the KL terms, CIFAR-10",
    "warmup-imagenet": "Epochs before the KL terms, ImageNet",
    "imagenet": "ImageNet, single weights",
    "fast-convergence": "Fast convergence: the target epoch moved forward",
}
HEADINGS = (
    "Model", "Method", "Sparsity", "Quantity", "n", "Paper, last", "Ours, last", "Paper, best", "Ours, best",
    "Minus our dense", "Within ± 2 std", "Remarks",
)  # fmt: skip
INTRODUCTION = (
    "This page is made by `dcil reproduce --report` from the records below results/, one per run; no number in its "
    "tables is typed by hand, only what was found out about a cell (results/findings.json). Accuracies are test top-1 "
    "in percent of the pruned net. Ours: mean ± sample standard deviation over n seeds, at the last epoch and at the "
    "best one, chosen on the test set as the paper does, of the epochs that are as sparse as the result (within a "
    "point). The paper's numbers without 'last' or 'best' stand under 'last'. 'Within ± 2 std' compares our mean with "
    "the paper's mean and standard deviation, where it prints one."
)
SOURCE_NOTE = (
    "Source: a digest of the package's files, which says what ran also where the machine had no repository, or a copy "
    "of the files beside an older one (then its commit ends in '-dirty')."
)
CHANGES_NOTE = (
    "What a cell computes has changed in small points since some records were made. These count on: each run is one of "
    "its recipe at its time."
)


def build(out: Path, docs: Path, trial: int | None = None) -> list[Path]:
    """Write both pages and the pictures into ``docs``; return their paths. ``trial``: the epochs of shortened runs."""
    if not out.is_dir():
        raise UserError(f"--out must be a folder with records, {out} is not a folder")
    found, traces = records.read_all(out), iterations.read_all(out)
    if not found and not traces:
        raise UserError(f"--out must hold at least one record, {out} holds none; dcil reproduce TABLE trains them")
    blocks = contents(found, traces, read_findings(out), trial)
    files = {"results.md": markdown(blocks), "results.html": html(TITLE, blocks)}
    files |= {block.file: block.file_text for block in blocks if isinstance(block, Picture)}
    check_pages(docs, list(files))
    for kind in ("flips-*", "iterations-*", "agreement", "sparsity", "stability"):
        for old in docs.glob(f"results-{kind}.svg"):  # pictures without records
            if old.name not in files:
                old.unlink()
    for name, text in files.items():
        write_output_text(docs / name, text)
    return [docs / name for name in files]


def check_pages(docs: Path, names: Sequence[str]) -> None:
    """Refuse a folder in which a page would replace a file that must be kept, or somebody's results.md."""
    for name in names:
        check_output(docs / name)
    page = docs / "results.md"
    if page.exists() and TITLE.encode() not in page.read_bytes():
        raise UserError(f"{page} is not a results page of dcil and would be replaced; choose another --docs")


def read_findings(out: Path) -> dict[str, str]:
    """Read findings.json: a remark per cell."""
    file = out / "findings.json"
    if not os.path.lexists(file):
        return {}
    with records.naming_record(file):
        findings = parse_object(read_text(file))
        FINDINGS(findings, "findings")
    for cell in findings:
        if cell not in tables.all_cells():
            raise unknown(f"cell in {file}", cell, tables.all_cells(), nearest_only=True)
    return {cell: " ".join(text.split()) for cell, text in findings.items()}


def contents(
    records: Sequence[Record], traces: Sequence[dict[str, Any]], findings: dict[str, str], trial: int | None
) -> list[MarkdownBlock]:
    """Return the blocks of the page; records that do not match their recipe are listed at its end."""
    cells = tables.all_cells()
    matching = [r for r in records if r.cell in cells and matches_recipe(r.raw["config"], cells[r.cell], trial)]
    shown = [t for t in traces if t["cell"] in cells and matches_recipe(t["config"], cells[t["cell"]], trial)]
    ours = Measurements(matching)
    trained = len(ours.by_cell)
    blocks: list[MarkdownBlock] = [Heading(TITLE, 1), Paragraph(INTRODUCTION)]
    if trial:
        blocks.append(
            Paragraph(f"A trial: every run is shortened to {trial} epochs, so the numbers are not the paper's cells.")
        )
    blocks.append(
        Paragraph(f"{len(matching)} runs of {trained} cells are recorded; {len(cells) - trained} cells were not run.")
    )
    blocks += overview.blocks(ours)
    blocks += paper_tables(ours, findings, trial)
    blocks += sections.blocks(ours, shown, findings, Estimate(ours.records), trial)
    blocks += environments(matching, trial)
    left_out = [f"{r.cell}-seed{r.seed}" for r in records if r not in matching]
    left_out += [f"iterations of {t['cell']}-seed{t['seed']}, epoch {t['epoch']}" for t in traces if t not in shown]
    if left_out:
        blocks.append(Heading("Records left out"))
        blocks.append(Paragraph("Their cell is unknown, or their settings are not those of its recipe today:"))
        blocks.append(Table(("Record",), tuple(TableRow((name,)) for name in left_out)))
    return blocks


def paper_tables(ours: Measurements, findings: dict[str, str], trial: int | None) -> list[MarkdownBlock]:
    """Return the paper's tables beside the measurements: rows with runs, the others folded away; those without any run
    in a section at the end."""
    blocks: list[MarkdownBlock] = []
    untouched: list[MarkdownBlock] = []
    estimate = Estimate(ours.records)
    for name in tables.names():
        if name in tables.FURTHER:
            continue
        rows = comparison_rows(name, ours)
        run, missing = [row for row in rows if row.runs], [row for row in rows if not row.runs]
        title = f"{TABLE_TITLES[name]} ({name})" if name in TABLE_TITLES else name
        if run:
            blocks += [Heading(title), paper_table(run, findings)]
        if missing:
            cells = [cell for cell in tables.cells_of(name) if not ours.records_of(cell)]
            what = "The rest of this table" if run else title
            part = not_run.folded(what, name, cells, paper_table(missing, findings), estimate, trial)
            (blocks if run else untouched).append(part)
    return [*blocks, Heading("Tables without a run"), *untouched] if untouched else blocks


def paper_table(rows: Sequence[ComparisonRow], findings: dict[str, str]) -> Table:
    """Return rows of one of the paper's tables beside the measurements."""
    return Table(HEADINGS, tuple(table_row(row, findings) for row in rows))


def table_row(row: ComparisonRow, findings: dict[str, str]) -> TableRow:
    """Format one comparison; a row outside of the paper's deviation or without runs is marked."""
    columns: list[str] = []
    digits = digits_of(row.quantity)
    for column in COLUMNS:
        number = row.paper.get(column)
        # The paper prints one number of a dense net, of the stability and of time.
        shown = number is not None or (column == "best" and row.quantity == "top-1")
        measured = (spread(row.ours[column], digits) or NOT_RUN) if shown else NONE
        columns += [printed(number) if number else NONE, measured]
    verdicts = [row.verdict_in_words(column) for column in COLUMNS if row.verdict(column)]
    outside = any(row.verdict(column) in ("above", "below") for column in COLUMNS)
    texts = (
        row.model,
        row.method + (f" ({row.variant})" if row.variant else ""),
        f"{100 * row.sparsity:g} %" if row.sparsity else NONE,
        row.quantity,
        str(row.runs) if row.runs else "",
        *columns,
        signed(statistics.fmean(row.to_dense)) if row.to_dense else NONE,
        ", ".join(verdicts) or NONE,
        remarks(row, findings),
    )
    return TableRow(texts, "outside" if outside else "" if row.runs else "missing")


def printed(number: PrintedNumber) -> str:
    """Format a number of the paper."""
    if number.mean is None:
        return "does not converge"
    if number.metric.endswith("_diff"):
        return signed(number.mean)
    return plus_minus(number.mean, number.std, digits_of(number.metric))


def digits_of(quantity: str) -> int:
    """Return as many digits as the paper prints."""
    return 3 if quantity.startswith("std") else 2


def remarks(row: ComparisonRow, findings: dict[str, str]) -> str:
    """Join the finding about the cell's accuracy, notes of the runs, and notes about the printed number."""
    about = [cell.id for cell in row.cells if cell.id in findings and row.quantity == "top-1"]
    words = list(dict.fromkeys(findings[cell] for cell in about))
    words += [f"Ours: {note}." for note in row.notes]
    words += [f"Ours is {cell.model}." for cell in row.cells if cell.model not in row.model]
    if any(number.quoted for number in row.paper.values()):
        words.append("Paper: quoted.")
    words += dict.fromkeys(f"Paper: {number.note}." for number in row.paper.values() if number.note)
    return " ".join(words)


def environments(records: Sequence[Record], trial: int | None) -> list[MarkdownBlock]:
    """Return the section on code, versions and hardware, with the number of sessions of each."""
    counts: dict[tuple[str, ...], int] = {}
    for record in records:
        for session in record.raw["sessions"]:
            # A record has the engine of the process that finished it; sessions have their own, but for old ones.
            code, env = session["code"], record.raw["environment"] | session["environment"]
            key = (
                f"{code['dcil']} ({code.get('commit') or NONE})",
                code.get("source", NONE),
                env["torch"],
                hardware(env),
                env.get("engine", NONE),
                env.get("precision", NONE),
            )
            counts[key] = counts.get(key, 0) + 1
    if not counts:
        return []
    rows = tuple(TableRow((*key, str(count))) for key, count in sorted(counts.items()))
    headings = ("dcil", "Source", "torch", "Hardware", "Engine", "Precision", "Sessions")
    return [Heading("Trained with"), Paragraph(SOURCE_NOTE), Table(headings, rows), *changes_since(records, trial)]


def changes_since(records: Sequence[Record], trial: int | None) -> list[MarkdownBlock]:
    """Return what the cells of records compute since the records were made."""
    cells, older = tables.all_cells(), dict[str, dict[str, int]]()
    for record in records:
        config, steps = cached_config(cells[record.cell], trial), record.raw["config"]["method"]["epoch_steps"]
        for revision in older_than(config, steps, record.raw["sessions"]):
            counts = older.setdefault(revision.what, {})
            counts[record.cell] = counts.get(record.cell, 0) + 1
    rows = [
        TableRow((what, str(sum(counts.values())), ", ".join(f"{cell} ({n})" for cell, n in counts.items())))
        for what, counts in older.items()
    ]
    return [Paragraph(CHANGES_NOTE), Table(("Since then", "Runs", "Of the cells"), tuple(rows))] if rows else []
