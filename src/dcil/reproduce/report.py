"""docs/results.md and docs/results.html, from the records alone: the same records give the same bytes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dcil.errors import UserError, unknown
from dcil.report.formatting import NONE, NOT_RUN, plus_minus, signed, spread
from dcil.report.page import Heading, MarkdownBlock, Paragraph, Picture, Table, TableRow, html, markdown
from dcil.reproduce import iterations, records, sections, tables
from dcil.reproduce.comparison import COLUMNS, Line, Ours, lines
from dcil.reproduce.matching import fits
from dcil.reproduce.paper import Row
from dcil.reproduce.records import Record
from dcil.runs.atomic import write_text
from dcil.runs.environment import hardware

TITLE = "The paper's tables, reproduced"
SAYS = {
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
HOW = (
    "This page is made by `dcil reproduce --report` from the records below results/, one per run; no number in its "
    "tables is typed by hand, only what was found out about a cell (results/findings.json). Accuracies are test top-1 "
    "in percent of the pruned net. Ours: mean ± sample standard deviation over n seeds, at the last epoch and at the "
    "best one, chosen on the test set as the paper does, of the epochs that are as sparse as the result (within a "
    "point). The paper's numbers without 'last' or 'best' stand under 'last'. 'Within ± 2 std' compares our mean with "
    "the paper's mean and standard deviation, where it prints one."
)
SOURCE = (
    "Source: a digest of the package's files, which says what ran also where the machine had no repository, or a copy "
    "of the files beside an older one (then its commit ends in '-dirty')."
)


def build(out: Path, docs: Path, trial: int | None = None) -> list[Path]:
    """Write both pages and the pictures into ``docs``; returns what was written. ``trial``: of runs that short."""
    if not out.is_dir():
        raise UserError(f"--out {out} is not a folder: there are no records in it")
    found, looks = records.read_all(out), iterations.read_all(out)
    if not found and not looks:
        raise UserError(f"there are no records below {out} yet: dcil reproduce TABLE makes them")
    try:
        blocks = contents(found, looks, findings(out), trial)
    except UserError:
        raise
    except Exception:
        for one in found:  # one of them says something impossible: which?
            with records.naming(one.path):
                contents([one], [], {}, trial)
        raise
    files = {"results.md": markdown(blocks), "results.html": html(TITLE, blocks)}
    files |= {block.file: block.file_text for block in blocks if isinstance(block, Picture)}
    for kind in ("flips", "iterations"):
        for old in docs.glob(f"results-{kind}-*.svg"):  # a picture whose records are gone
            if old.name not in files:
                old.unlink()
    for name, text in files.items():
        write_text(docs / name, text)
    return [docs / name for name in files]


def findings(out: Path) -> dict[str, str]:
    """results/findings.json: cell -> what was found out about it."""
    file = out / "findings.json"
    if not file.exists():
        return {}
    with records.naming(file):
        found = {cell: " ".join(text.split()) for cell, text in json.loads(file.read_text(encoding="utf-8")).items()}
    for cell in found:
        if cell not in tables.known():
            raise unknown(f"cell in {file}", cell, tables.known(), nearest_only=True)
    return found


def contents(
    records: Sequence[Record], looks: Sequence[dict[str, Any]], found: dict[str, str], trial: int | None
) -> list[MarkdownBlock]:
    known = tables.known()
    fitting = [r for r in records if r.cell in known and fits(r.raw["config"], known[r.cell], trial)]
    seen = [o for o in looks if o["cell"] in known and fits(o["config"], known[o["cell"]], trial)]
    ours = Ours(fitting)
    run = len(ours.by_cell)
    blocks: list[MarkdownBlock] = [Heading(TITLE, 1), Paragraph(HOW)]
    if trial:
        blocks.append(
            Paragraph(f"A trial: every run is shortened to {trial} epochs, so the numbers are not the paper's cells.")
        )
    blocks.append(Paragraph(f"{len(fitting)} runs of {run} cells are recorded; {len(known) - run} cells were not run."))
    for name in tables.names():
        if name != tables.BEYOND:
            blocks += [
                Heading(f"{SAYS[name]} ({name})" if name in SAYS else name),
                paper_table(lines(name, ours), found),
            ]
    blocks += sections.blocks(ours, seen, found)
    blocks += with_what(fitting)
    left = [f"{r.cell}-seed{r.seed}" for r in records if r not in fitting]
    left += [f"iterations of {o['cell']}-seed{o['seed']}, epoch {o['epoch']}" for o in looks if o not in seen]
    if left:
        blocks.append(Heading("Records left out"))
        blocks.append(Paragraph("Their cell is unknown, or their settings are not those of its recipe today:"))
        blocks.append(Table(("Record",), tuple(TableRow((name,)) for name in left)))
    return blocks


def paper_table(found: Sequence[Line], remarks: dict[str, str]) -> Table:
    return Table(HEADINGS, tuple(as_cells(line, remarks) for line in found))


def as_cells(line: Line, remarks: dict[str, str]) -> TableRow:
    columns: list[str] = []
    digits = digits_of(line.quantity)
    for column in COLUMNS:
        row = line.paper.get(column)
        # The paper prints one number of a dense net, of the stability and of time.
        shown = row is not None or (column == "best" and line.quantity == "top-1")
        columns += [printed(row) if row else NONE, (spread(line.ours[column], digits) or NOT_RUN) if shown else NONE]
    marks = [f"{column} {mark}" for column in COLUMNS if (mark := line.mark(column))]
    outside = any(line.mark(column) in ("above", "below") for column in COLUMNS)
    texts = (
        line.model,
        line.method + (f" ({line.variant})" if line.variant else ""),
        f"{100 * line.sparsity:g} %" if line.sparsity else NONE,
        line.quantity,
        str(line.runs) if line.runs else "",
        *columns,
        signed(statistics.fmean(line.to_dense)) if line.to_dense else NONE,
        ", ".join(marks) or NONE,
        remark(line, remarks),
    )
    return TableRow(texts, "outside" if outside else "" if line.runs else "missing")


def printed(row: Row) -> str:
    """Format a number of the paper."""
    if row.mean is None:
        return "does not converge"
    if row.metric.endswith("_diff"):
        return signed(row.mean)
    return plus_minus(row.mean, row.std, digits_of(row.metric))


def digits_of(quantity: str) -> int:
    """Return as many digits as the paper prints."""
    return 3 if quantity.startswith("std") else 2


def remark(line: Line, found: dict[str, str]) -> str:
    """Our finding about the cell's accuracy first, then what is known about the printed number."""
    about = [cell.id for cell in line.cells if cell.id in found and line.quantity == "top-1"]
    words = list(dict.fromkeys(found[cell] for cell in about))
    words += [f"Ours: {note}." for note in line.notes]
    words += [f"Ours is {cell.model}." for cell in line.cells if cell.model not in line.model]
    if any(row.quoted for row in line.paper.values()):
        words.append("Paper: quoted.")
    words += dict.fromkeys(f"Paper: {row.note}." for row in line.paper.values() if row.note)
    return " ".join(words)


def with_what(records: Sequence[Record]) -> list[MarkdownBlock]:
    """Code, versions and hardware, by how many sessions used them."""
    counts: dict[tuple[str, ...], int] = {}
    for found in records:
        for session in found.raw["sessions"]:
            code, env = session["code"], session["environment"]
            key = (
                f"{code['dcil']} ({code.get('commit') or NONE})",
                code.get("source", NONE),
                env["torch"],
                hardware(env),
                found.raw["environment"].get("engine", NONE),
                found.raw["environment"].get("precision", NONE),
            )
            counts[key] = counts.get(key, 0) + 1
    if not counts:
        return []
    rows = tuple(TableRow((*key, str(count))) for key, count in sorted(counts.items()))
    headings = ("dcil", "Source", "torch", "Hardware", "Engine", "Precision", "Sessions")
    return [Heading("Trained with"), Paragraph(SOURCE), Table(headings, rows)]
