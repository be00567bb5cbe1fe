"""The parts of the report that the paper has no table of: claims, further methods, cost, and what mask updates do."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dcil.report.formatting import NONE, NOT_RUN, number, signed, spread
from dcil.report.page import Heading, MarkdownBlock, Paragraph, Table, TableRow
from dcil.reproduce import figures, mask_age, tables
from dcil.reproduce.cells import Cell
from dcil.reproduce.comparison import Ours, paces
from dcil.reproduce.iterations import CELLS, EPOCHS
from dcil.reproduce.records import Record


def blocks(ours: Ours, looks: Sequence[dict[str, Any]], found: dict[str, str]) -> list[MarkdownBlock]:
    known = tables.known()
    run = [known[cell] for cell in known if cell in ours.by_cell]
    return [
        Heading(f"More methods on ResNet-20 ({tables.BEYOND})"),
        Paragraph(
            "DCIL without its KL terms and methods that the paper quotes or does not mention, trained with its recipe "
            "instead of that of their own papers."
        ),
        further(ours, found),
        Heading("DCIL against DPF"),
        Paragraph("The paper's main claim: DCIL at its last epoch is above DPF at its best one."),
        claim(ours, run),
        Heading("Cost of training"),
        Paragraph(
            "Median seconds per epoch, against DPF with the same network, hardware and runs at once; paper: 1.5."
        ),
        cost(ours, run),
        *iterations(looks),
        *mask_age.blocks(ours, run),
        Heading("What mask updates do"),
        Paragraph(
            "Change: weights revived by a mask update, in percent of the prunable weights, over the first and the last "
            "tenth of the epochs. Drop: top-1 right before a mask update minus top-1 right after it, over the updates "
            f"looked at in the first and second half of the training. {STAY}"
        ),
        updates(ours, run),
        *flips(ours, run),
    ]


STAY = (
    "A stay lasts from the step that revives a weight to the step that drops it again: the mean and the class of "
    "the median, in steps, of the stays that ended, and how many weights were in one when the training ended."
)


def further(ours: Ours, found: dict[str, str]) -> Table:
    rows = []
    for cell in tables.cells_of(tables.BEYOND):
        values = [spread(ours.values(cell, "top-1", column)) or NOT_RUN for column in ("last", "best")]
        to_dense = ours.values(cell, "top-1 minus dense", "last")
        texts = (
            cell.id,
            str(len(ours.of(cell)) or ""),
            *values,
            signed(statistics.fmean(to_dense)) if to_dense else NONE,
            spread(ours.values(cell, "std", "last")) or NONE,
            found.get(cell.id, ""),
        )
        rows.append(TableRow(texts, "" if ours.of(cell) else "missing"))
    headings = ("Cell", "n", "Last", "Best", "Minus dense", "Std of the last 10 %", "Remarks")
    return Table(headings, tuple(rows))


def claim(ours: Ours, run: Sequence[Cell]) -> Table:
    rows = []
    for cell in run:
        dpf = dataclasses.replace(cell, method="dpf")
        main = cell.method == "dcil" and cell.kl and cell.warmup is None and cell.target is None
        if main and ours.of(dpf):
            last, best = ours.values(cell, "top-1", "last"), ours.values(dpf, "top-1", "best")
            ahead = statistics.fmean(last) - statistics.fmean(best)
            texts = (cell.id, spread(last), spread(best), signed(ahead), "holds" if ahead > 0 else "does not hold")
            rows.append(TableRow(texts, "" if ahead > 0 else "outside"))
    return Table(("Cell", "DCIL, last", "DPF, best", "Difference", "The claim"), tuple(rows))


def cost(ours: Ours, run: Sequence[Cell]) -> Table:
    rows = []
    for cell in run:
        # Masked weights cost as much as others, so the DPF runs of all sparsities will do.
        reference = paces(r for c in run if c.method == "dpf" and c.dense == cell.dense for r in ours.of(c))
        for (hardware, at_once), seconds in sorted(paces(ours.of(cell)).items()):
            beside = reference.get((hardware, at_once))
            ratio = NONE if beside is None else f"{seconds / beside:.2f}"
            rows.append(TableRow((cell.id, hardware, str(at_once), number(seconds), ratio)))
    return Table(("Cell", "Hardware", "Runs at once", "Seconds per epoch", "Relative to DPF"), tuple(rows))


def iterations(looks: Sequence[dict[str, Any]]) -> list[MarkdownBlock]:
    """The paper's figure: what `dcil reproduce iterations` saw, and what of it was not run."""
    rows = {(look["cell"], look["epoch"], look["seed"]): look_row(look) for look in looks}
    there = {place[:2] for place in rows}
    for cell, epoch in ((cell.id, epoch) for cell in CELLS for epoch in EPOCHS):
        if (cell, epoch) not in there:
            rows[cell, epoch, 0] = TableRow((cell, str(epoch), NONE, NOT_RUN, NONE, NONE), "missing")
    headings = ("Cell", "Epoch", "Seed", "Mask changes", "Drop at a change", "Largest")
    epochs = sorted({look["epoch"] for look in looks})
    return [
        Heading("Accuracy after every iteration of an epoch"),
        Paragraph(
            "`dcil reproduce iterations`: one epoch of one run, evaluated after each of its iterations. Drop: top-1 "
            "before minus top-1 after a mask change, mean ± standard deviation over the changes of that epoch."
        ),
        Table(headings, tuple(rows[place] for place in sorted(rows))),
        *(figures.iterations(epoch, [o for o in looks if o["epoch"] == epoch]) for epoch in epochs),
    ]


def look_row(look: Mapping[str, Any]) -> TableRow:
    drops = [d for step, *_ in look["updates"] if (d := drop_at(look["top1"], step)) is not None]
    largest = number(max(drops)) if drops else NONE
    place = look["cell"], str(look["epoch"]), str(look["seed"])
    return TableRow((*place, str(len(drops)), spread(drops) or NONE, largest))


def drop_at(top1: Sequence[float], step: int) -> float | None:
    """How far the accuracy fell in the iteration (from 1) that changed the masks."""
    return top1[step - 2] - top1[step - 1] if step >= 2 else None


def updates(ours: Ours, run: Sequence[Cell]) -> Table:
    rows = []
    for cell in run:
        records = [r for r in ours.of(cell) if any(r.column("updates"))]
        if records:
            drops = [half_drops(record) for record in records]
            texts = (
                cell.id,
                str(len(records)),
                *(spread([v for r in records if (v := revived(r, tail)) is not None], 3) or NONE for tail in (0, 1)),
                *(spread([statistics.fmean(d[half]) for d in drops if d[half]]) or NONE for half in (0, 1)),
                *stays(records),
            )
            rows.append(TableRow(texts))
    headings = (
        "Cell", "n", "Change, first %", "Change, last %", "Drop, first half", "Drop, second half",
        "Stays ended", "Mean stay", "Median stay", "Still in one",
    )  # fmt: skip
    return Table(headings, tuple(rows))


def revived(record: Record, tail: int) -> float | None:
    """Percent of the weights that an update of the first (0) or last (1) tenth of the epochs revives."""
    counts = record.column("revived")
    tenth = max(1, len(counts) // 10)
    part = [count for count in (counts[-tenth:] if tail else counts[:tenth]) if count is not None]
    return 100 * statistics.fmean(part) / record.raw["summary"]["weights"] if part else None


def half_drops(record: Record) -> tuple[list[float], list[float]]:
    """Drops around the updates looked at, in the first and in the second half of the training."""
    half = len(record.column("top1")) / 2
    looks = record.raw["around_changes"]
    return (
        [before - after for epoch, _, before, after in looks if epoch <= half],
        [before - after for epoch, _, before, after in looks if epoch > half],
    )


def stays(records: Sequence[Record]) -> tuple[str, str, str, str]:
    """Stays that ended, their mean and the class of their median in steps, and stays that had not ended: per run."""
    found: list[Mapping[str, Any]] = [record.raw["stays"] for record in records if record.raw["stays"] is not None]
    if not found:  # trained without being watched
        return NONE, NONE, NONE, NONE
    counts = [sum(s["ended"][i] for s in found) for i in range(len(found[0]["ended"]))]
    total = sum(counts)
    still = f"{sum(s['still_there'] for s in found) // len(found):,}"
    if not total:
        return "0", NONE, NONE, still
    middle = next(i for i in range(len(counts)) if 2 * sum(counts[: i + 1]) >= total)
    low = found[0]["at_least"][middle]
    mean = sum(s["steps_stayed"] for s in found) / total
    return f"{total // len(found):,}", f"{mean:,.0f}", f"{low:,} to {2 * low - 1:,}", still


def flips(ours: Ours, run: Sequence[Cell]) -> list[MarkdownBlock]:
    """A picture per network: the cells of its main recipe."""
    found: list[MarkdownBlock] = []
    for network in dict.fromkeys((cell.dataset, cell.model) for cell in run):
        cells = {
            cell.name: ours.of(cell)
            for cell in run
            if (cell.dataset, cell.model) == network and cell.target is None and cell.warmup is None
            if any(any(record.column("updates")) for record in ours.of(cell))
        }
        if cells:
            found.append(figures.flips(f"{network[1]} on {network[0]}", f"flips-{'-'.join(network)}", cells))
    return found
