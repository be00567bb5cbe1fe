"""Sections of the results page beyond the paper's tables: further methods, the claim, cost, and mask updates."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dcil.report.formatting import NONE, NOT_RUN, number, signed, spread
from dcil.report.page import Heading, MarkdownBlock, Paragraph, Table, TableRow
from dcil.reproduce import figures, mask_age, not_run, tables
from dcil.reproduce.cells import Cell
from dcil.reproduce.comparison import Measurements, median_epoch_times
from dcil.reproduce.estimate import Estimate
from dcil.reproduce.iterations import CELLS, EPOCHS
from dcil.reproduce.records import Record


def blocks(
    ours: Measurements,
    traces: Sequence[dict[str, Any]],
    findings: dict[str, str],
    estimate: Estimate,
    trial: int | None,
) -> list[MarkdownBlock]:
    """Return all sections."""
    cells = [cell for cell in tables.all_cells().values() if cell.id in ours.by_cell]
    return [
        Heading(f"More methods on ResNet-20 ({tables.BEYOND})"),
        Paragraph(
            "Every method that prunes single weights, at 90, 95 and 98 %, trained with the paper's recipe and not "
            "that of its own paper; and DCIL whose super net takes a part of every batch (`share`)."
        ),
        *further_methods(ours, findings, estimate, trial),
        *transformers(ours, findings),
        Heading("DCIL against DPF"),
        Paragraph("The paper's main claim: DCIL at its last epoch is above DPF at its best one."),
        claim_table(ours, cells),
        Heading("Cost of training"),
        Paragraph(
            "Median seconds per epoch, against DPF with the same network, hardware and runs at once; paper: 1.5. With "
            "several runs at once the neighbours, which differ from row to row, share the GPU: such a ratio is rough, "
            "and of runs side by side it is near 1 whatever they cost. `dcil bench train` measures the cost of a step."
        ),
        cost_table(ours, cells),
        *iterations(traces),
        *mask_age.blocks(ours, cells),
        Heading("What mask updates do"),
        Paragraph(
            "Change: weights revived by a mask update, in percent of the prunable weights, over the first and the last "
            "tenth of the epochs. Drop: top-1 right before a mask update minus top-1 right after it, over the updates "
            f"looked at in the first and second half of the training. {LIFETIMES}"
        ),
        mask_updates(ours, cells),
        *flips(ours, cells),
    ]


LIFETIMES = (
    "A stay lasts from the step that revives a weight to the step that drops it again: the mean and the class of "
    "the median, in steps, of the stays that ended, and how many weights were in one when the training ended."
)


def further_methods(
    ours: Measurements, findings: dict[str, str], estimate: Estimate, trial: int | None
) -> list[MarkdownBlock]:
    """Return the table of the cells that are not in the paper, those without a run folded away."""
    cells = tables.cells_of(tables.BEYOND)
    missing = [cell for cell in cells if not ours.records_of(cell)]
    found: list[MarkdownBlock] = [further_table([cell for cell in cells if cell not in missing], ours, findings)]
    if missing:
        shown = Table(("Cell",), tuple(TableRow((cell.id,), "missing") for cell in missing))
        found.append(not_run.folded("The rest of this table", tables.BEYOND, missing, shown, estimate, trial))
    return found


def further_table(cells: Sequence[Cell], ours: Measurements, findings: dict[str, str]) -> Table:
    """Return the numbers of recorded cells."""
    rows = []
    for cell in cells:
        values = [spread(ours.values(cell, "top-1", column)) for column in ("last", "best")]
        to_dense = ours.values(cell, "top-1 minus dense", "last")
        texts = (
            cell.id,
            str(len(ours.records_of(cell))),
            *values,
            signed(statistics.fmean(to_dense)) if to_dense else NONE,
            spread(ours.values(cell, "std", "last")) or NONE,
            findings.get(cell.id, ""),
        )
        rows.append(TableRow(texts))
    headings = ("Cell", "n", "Last", "Best", "Minus dense", "Std of the last 10 %", "Remarks")
    return Table(headings, tuple(rows))


def transformers(ours: Measurements, findings: dict[str, str]) -> list[MarkdownBlock]:
    """Return a table per network of the recorded cells of transformers, and how many were not run."""
    cells = tables.cells_of(tables.TRANSFORMERS)
    recorded = [cell for cell in cells if ours.records_of(cell)]
    if not recorded:
        return []
    found: list[MarkdownBlock] = [
        Heading(f"Transformers ({tables.TRANSFORMERS})"),
        Paragraph(
            "A GPT of characters on tiny Shakespeare, or a small one on Python's help texts (pydoc), by its validation "
            "loss in nats per character (lower is better), "
            "and a ViT on CIFAR-10, by its test accuracy in percent; `private` says what each of DCIL's paths has for "
            f"itself, where that is not norm layers and head. {len(cells) - len(recorded)} cells were not run."
        ),
    ]
    for network in dict.fromkeys((cell.dataset, cell.model) for cell in recorded):
        members = [cell for cell in recorded if (cell.dataset, cell.model) == network]
        found.append(transformer_table(members, ours, findings))
    return found


def transformer_table(cells: Sequence[Cell], ours: Measurements, findings: dict[str, str]) -> Table:
    """Return the numbers of one network's cells."""
    quantity, digits = ("loss", 4) if cells[0].is_text else ("top-1", 2)
    rows = []
    for cell in cells:
        to_dense = ours.values(cell, f"{quantity} minus dense", "last") if cell != cell.dense else []
        texts = (
            cell.id,
            str(len(ours.records_of(cell))),
            *(spread(ours.values(cell, quantity, column), digits) for column in ("last", "best")),
            signed(statistics.fmean(to_dense), digits) if to_dense else NONE,
            *([spread(ours.values(cell, "top-1", "last"))] if cell.is_text else []),
            findings.get(cell.id, ""),
        )
        rows.append(TableRow(texts))
    more = ["Top-1 %"] if cells[0].is_text else []
    return Table(("Cell", "n", "Last", "Best", "Minus dense", *more, "Remarks"), tuple(rows))


def claim_table(ours: Measurements, cells: Sequence[Cell]) -> Table:
    """Compare DCIL at its last epoch with DPF at its best, cell by cell."""
    rows = []
    for cell in cells:
        dpf = dataclasses.replace(cell, method="dpf")
        main = cell.method == "dcil" and cell.kl and cell.warmup is None and cell.target is None and not cell.is_text
        if main and ours.records_of(dpf):
            last, best = ours.values(cell, "top-1", "last"), ours.values(dpf, "top-1", "best")
            ahead = statistics.fmean(last) - statistics.fmean(best)
            texts = (cell.id, spread(last), spread(best), signed(ahead), "holds" if ahead > 0 else "does not hold")
            rows.append(TableRow(texts, "" if ahead > 0 else "outside"))
    return Table(("Cell", "DCIL, last", "DPF, best", "Difference", "The claim"), tuple(rows))


def cost_table(ours: Measurements, cells: Sequence[Cell]) -> Table:
    """Compare the time per epoch with that of DPF."""
    rows = []
    for cell in cells:
        # Masked weights cost as much as others, so DPF runs of any sparsity can be the reference.
        dpf = [c for c in cells if c.method == "dpf" and c.dense == cell.dense]
        reference = median_epoch_times(record for c in dpf for record in ours.records_of(c))
        for (hardware, at_once), seconds in sorted(median_epoch_times(ours.records_of(cell)).items()):
            of_dpf = reference.get((hardware, at_once))
            ratio = NONE if of_dpf is None else f"{seconds / of_dpf:.2f}"
            rows.append(TableRow((cell.id, hardware, str(at_once), number(seconds), ratio)))
    return Table(("Cell", "Hardware", "Runs at once", "Seconds per epoch", "Relative to DPF"), tuple(rows))


def iterations(traces: Sequence[dict[str, Any]]) -> list[MarkdownBlock]:
    """Return the section of the paper's figure: recorded iteration traces, and those that were not run."""
    rows = {(trace["cell"], trace["epoch"], trace["seed"]): trace_row(trace) for trace in traces}
    recorded = {key[:2] for key in rows}
    for cell, epoch in ((cell.id, epoch) for cell in CELLS for epoch in EPOCHS):
        if (cell, epoch) not in recorded:
            rows[cell, epoch, 0] = TableRow((cell, str(epoch), NONE, NOT_RUN, NONE, NONE), "missing")
    headings = ("Cell", "Epoch", "Seed", "Mask changes", "Drop at a change", "Largest")
    epochs = sorted({trace["epoch"] for trace in traces})
    return [
        Heading("Accuracy after every iteration of an epoch"),
        Paragraph(
            "`dcil reproduce iterations`: one epoch of one run, evaluated after each of its iterations. Drop: top-1 "
            "before minus top-1 after a mask change, mean ± standard deviation over the changes of that epoch."
        ),
        Table(headings, tuple(rows[key] for key in sorted(rows))),
        *(figures.iterations(epoch, [trace for trace in traces if trace["epoch"] == epoch]) for epoch in epochs),
    ]


def trace_row(trace: Mapping[str, Any]) -> TableRow:
    """Return the drops at the mask changes of one trace."""
    drops = [d for step, *_ in trace["updates"] if (d := drop_at(trace["top1"], step)) is not None]
    largest = number(max(drops)) if drops else NONE
    names = trace["cell"], str(trace["epoch"]), str(trace["seed"])
    return TableRow((*names, str(len(drops)), spread(drops) or NONE, largest))


def drop_at(top1: Sequence[float], step: int) -> float | None:
    """Return how far the accuracy fell in the iteration (from 1) that changed the masks."""
    return top1[step - 2] - top1[step - 1] if step >= 2 else None


def mask_updates(ours: Measurements, cells: Sequence[Cell]) -> Table:
    """Return weights revived, accuracy drops and lifetimes, by cell."""
    rows = []
    for cell in cells:
        records = [r for r in ours.records_of(cell) if any(r.column("updates"))]
        if records:
            drops = [half_drops(record) for record in records]
            texts = (
                cell.id,
                str(len(records)),
                *(spread([v for r in records if (v := revived(r, tail)) is not None], 3) or NONE for tail in (0, 1)),
                *(spread([statistics.fmean(d[half]) for d in drops if d[half]]) or NONE for half in (0, 1)),
                *lifetimes(records),
            )
            rows.append(TableRow(texts))
    headings = (
        "Cell", "n", "Change, first %", "Change, last %", "Drop, first half", "Drop, second half",
        "Stays ended", "Mean stay", "Median stay", "Still in one",
    )  # fmt: skip
    return Table(headings, tuple(rows))


def revived(record: Record, tail: int) -> float | None:
    """Return the percentage of weights that an update of the first (0) or last (1) tenth of the epochs revives."""
    counts = record.column("revived")
    tenth = max(1, len(counts) // 10)
    part = [count for count in (counts[-tenth:] if tail else counts[:tenth]) if count is not None]
    return 100 * statistics.fmean(part) / record.raw["summary"]["weights"] if part else None


def half_drops(record: Record) -> tuple[list[float], list[float]]:
    """Return the drops around observed updates, in the first and in the second half of the training."""
    half = len(record.column("top1")) / 2
    changes = record.raw["around_changes"]
    return (
        [before - after for epoch, _, before, after in changes if epoch <= half],
        [before - after for epoch, _, before, after in changes if epoch > half],
    )


def lifetimes(records: Sequence[Record]) -> tuple[str, str, str, str]:
    """Return how many lifetimes ended, their mean and median class in steps, and how many had not ended, per run."""
    counted: list[Mapping[str, Any]] = [record.raw["stays"] for record in records if record.raw["stays"] is not None]
    if not counted:  # trained without a probe
        return NONE, NONE, NONE, NONE
    counts = [sum(s["ended"][i] for s in counted) for i in range(len(counted[0]["ended"]))]
    total = sum(counts)
    still = f"{sum(s['still_there'] for s in counted) // len(counted):,}"
    if not total:
        return "0", NONE, NONE, still
    middle = next(i for i in range(len(counts)) if 2 * sum(counts[: i + 1]) >= total)
    low = counted[0]["at_least"][middle]
    mean = sum(s["steps_stayed"] for s in counted) / total
    return f"{total // len(counted):,}", f"{mean:,.0f}", f"{low:,} to {2 * low - 1:,}", still


def flips(ours: Measurements, cells: Sequence[Cell]) -> list[MarkdownBlock]:
    """Draw a picture per network with the cells of its main recipe."""
    pictures: list[MarkdownBlock] = []
    for network in dict.fromkeys((cell.dataset, cell.model) for cell in cells):
        main = {
            cell.name: ours.records_of(cell)
            for cell in cells
            if (cell.dataset, cell.model) == network and cell.target is None and cell.warmup is None
            if cell.method in ("dpf", "dcil") and cell.share is None  # more would hide each other
            if any(any(record.column("updates")) for record in ours.records_of(cell))
        }
        if main:
            pictures.append(figures.flips(f"{network[1]} on {network[0]}", f"flips-{'-'.join(network)}", main))
    return pictures
