"""Accuracy by the age of the masks when an epoch was evaluated.

Epochs end at any point between two mask changes, so the accuracy of a method that loses accuracy at a change depends on
where its last epoch ends.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from dcil.report.formatting import NONE, number
from dcil.report.page import Heading, MarkdownBlock, Paragraph, Table, TableRow
from dcil.reproduce.cells import Cell
from dcil.reproduce.comparison import Measurements
from dcil.reproduce.needed_epochs import LAST_PART
from dcil.reproduce.records import Record

CLASSES = ((0, 1 / 8), (1 / 8, 1 / 4), (1 / 4, 1 / 2), (1 / 2, 1))  # of the steps between two changes


def blocks(ours: Measurements, cells: Sequence[Cell]) -> list[MarkdownBlock]:
    """Return the section of the results page."""
    rows = []
    for cell in cells:
        records = [record for record in ours.records_of(cell) if by_age(record)]
        if records:
            pairs = [pair for record in records for pair in by_age(record)]
            every = records[0].raw["config"]["method"]["every"]
            means = [mean(top1 for age, top1 in pairs if low <= age / every < high) for low, high in CLASSES]
            rows.append(TableRow((cell.id, str(every), *means, str(pairs[-1][0]))))
    headings = ("Cell", "Steps from change to change", "First eighth", "Second eighth", "Second quarter", "Second half")
    return [
        Heading("The age of the masks when an epoch ends"),
        Paragraph(
            "Mean top-1 of the last fifth of the epochs, by how much of the way from one mask change to the next was "
            "gone when the epoch ended and was evaluated; and how many steps that were in the last epoch."
        ),
        Table((*headings, "Steps at the end"), tuple(rows)),
    ]


def by_age(record: Record) -> list[tuple[int, float]]:
    """Return (steps since the last change, top-1) of the last epochs in which masks changed at regular steps."""
    method, top1, updates = record.raw["config"]["method"], record.column("top1"), record.column("updates")
    every, steps = method.get("every", 1), method["epoch_steps"]
    epochs = range(len(top1) - len(top1) // LAST_PART + 1, len(top1) + 1)
    regular = [epoch for epoch in epochs if every > 1 and abs((updates[epoch - 1] or 0) - steps / every) < 1]
    return [(epoch * steps % every, top1[epoch - 1]) for epoch in regular if top1[epoch - 1] is not None]


def mean(values: Iterable[float]) -> str:
    listed = list(values)
    return number(statistics.fmean(listed)) if listed else NONE
