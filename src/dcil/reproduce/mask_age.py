"""How old the masks were when an epoch was evaluated: epochs end at any point between two mask changes, so the accuracy
of a method that suffers from changes depends on where its last epoch happens to end."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from dcil.report.formatting import NONE, number
from dcil.report.page import Heading, MarkdownBlock, Paragraph, Table, TableRow
from dcil.reproduce.cells import Cell
from dcil.reproduce.comparison import Ours
from dcil.reproduce.records import Record

SHARE = 5  # of the epochs, the last one in so many
CLASSES = ((0, 1 / 8), (1 / 8, 1 / 4), (1 / 4, 1 / 2), (1 / 2, 1))  # of the steps between two changes


def blocks(ours: Ours, run: Sequence[Cell]) -> list[MarkdownBlock]:
    rows = []
    for cell in run:
        found = [pair for record in ours.of(cell) for pair in by_age(record)]
        if found:
            every = ours.of(cell)[0].raw["config"]["method"]["every"]
            means = [mean(top1 for age, top1 in found if low <= age / every < high) for low, high in CLASSES]
            rows.append(TableRow((cell.id, str(every), *means, str(found[-1][0]))))
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
    """(steps since the last change, top-1) of those of the last epochs in which masks changed every so many steps."""
    method, top1, updates = record.raw["config"]["method"], record.column("top1"), record.column("updates")
    every, steps = method.get("every", 1), method["epoch_steps"]
    epochs = range(len(top1) - len(top1) // SHARE + 1, len(top1) + 1)
    regular = [epoch for epoch in epochs if every > 1 and abs((updates[epoch - 1] or 0) - steps / every) < 1]
    return [(epoch * steps % every, top1[epoch - 1]) for epoch in regular]


def mean(values: Iterable[float]) -> str:
    found = list(values)
    return number(statistics.fmean(found)) if found else NONE
