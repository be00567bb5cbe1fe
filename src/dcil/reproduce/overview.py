"""The top of the results page: what came out, at a glance."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dcil.report.formatting import number
from dcil.report.page import Heading, MarkdownBlock, Table, TableRow
from dcil.reproduce import overview_figures, paper, tables
from dcil.reproduce.cells import Cell
from dcil.reproduce.comparison import COLUMNS, Measurements, comparison_rows, median_epoch_times
from dcil.reproduce.records import Record


class Comparison(NamedTuple):
    """One accuracy of a cell beside the same of the paper's own runs."""

    cell: Cell
    column: str
    ours: list[float]
    mean: float
    std: float

    @property
    def difference(self) -> float:
        return statistics.fmean(self.ours) - self.mean

    @property
    def beyond(self) -> float:
        """How far outside of two of the paper's standard deviations: 0 within them."""
        return max(abs(self.difference) - 2 * self.std, 0.0)


class Pair(NamedTuple):
    """DCIL and DPF of one network and sparsity, both recorded."""

    dcil: Cell
    dpf: Cell


def blocks(ours: Measurements) -> list[MarkdownBlock]:
    """Return the section: counts, and a picture for each claim."""
    recorded = [cell for cell in tables.all_cells().values() if ours.records_of(cell)]
    if not recorded:
        return []
    compared, pairs = comparisons(ours), pairs_of(ours, recorded)
    rows = [
        ("Cells of the paper's tables with a run", counted_cells(ours)),
        *agreement(compared),
        *claims(ours, pairs),
        ("Time of the recorded runs", f"{gpu_hours(ours.records):.1f} hours of the devices below"),
    ]
    return [
        Heading("At a glance"),
        Table(("Question", "Answer"), tuple(TableRow(row) for row in rows)),
        *overview_figures.pictures(compared, ours, recorded),
    ]


def counted_cells(ours: Measurements) -> str:
    """Say how many of the paper's cells were run, with how many seeds."""
    printed = {cell.id for name in tables.names() if name not in tables.FURTHER for cell in tables.cells_of(name)}
    runs = [len(found) for cell, found in ours.by_cell.items() if cell in printed]
    three = sum(count >= 3 for count in runs)
    return f"{len(runs)} of {len(printed)}, {three} of them with three seeds or more, {runs.count(1)} with one"


def comparisons(ours: Measurements) -> list[Comparison]:
    """Return every accuracy that the paper prints of its own runs with a deviation, and we have, once."""
    found: dict[tuple[str, str], Comparison] = {}
    for table in dict.fromkeys(printed.table for printed in paper.numbers()):
        for row in comparison_rows(table, ours):
            for column in COLUMNS if row.quantity == "top-1" and len(row.cells) == 1 else ():
                printed, values = row.paper.get(column), row.ours[column]
                if printed is None or printed.quoted or printed.mean is None or printed.std is None or not values:
                    continue
                key = row.cells[0].id, column
                found.setdefault(key, Comparison(row.cells[0], column, values, printed.mean, printed.std))
    return list(found.values())


def agreement(compared: Sequence[Comparison]) -> list[tuple[str, str]]:
    """Count the accuracies within two standard deviations of the paper's."""
    rows = []
    for column, words in (("last", "last epoch"), ("best", "best epoch")):
        of_column = [one for one in compared if one.column == column]
        outside = [one for one in of_column if one.beyond > 1e-9]
        text = f"{len(of_column) - len(outside)} of {len(of_column)}"
        if outside:
            text += f"; the others by {span([one.beyond for one in outside])} points beyond"
        if of_column:
            rows.append((f"Within ± 2 std of the paper's own runs, {words}", text))
    if compared:
        mean = statistics.fmean(one.difference for one in compared)
        rows.append(("Ours minus the paper's, mean over both", f"{mean:+.2f} points".replace("-", "\N{MINUS SIGN}")))
    return rows


def pairs_of(ours: Measurements, cells: Iterable[Cell]) -> list[Pair]:
    """Return the networks and sparsities of which both DCIL and DPF were run with the main recipe."""
    found = []
    for cell in cells:
        dpf = dataclasses.replace(cell, method="dpf")
        main = cell.method == "dcil" and cell.kl and cell.warmup is None and cell.target is None and not cell.is_text
        if main and ours.records_of(dpf):
            found.append(Pair(cell, dpf))
    return found


def claims(ours: Measurements, pairs: Sequence[Pair]) -> list[tuple[str, str]]:
    """Count where the paper's claims hold: accuracy, stability, and what they cost."""
    if not pairs:
        return []
    ahead = [
        statistics.fmean(ours.values(pair.dcil, "top-1", "last"))
        - statistics.fmean(ours.values(pair.dpf, "top-1", "best"))
        for pair in pairs
    ]
    spreads = [[statistics.fmean(ours.values(cell, "std", "last")) for cell in pair] for pair in pairs]
    steadier = sum(dcil < dpf for dcil, dpf in spreads)
    dcil, dpf = zip(*spreads, strict=True)
    rows = [
        (
            "DCIL at its last epoch above DPF at its best",
            f"{sum(one > 0 for one in ahead)} of {len(pairs)}, by {span(ahead)} points",
        ),
        (
            "DCIL steadier than DPF over the last 10 % of epochs",
            f"{steadier} of {len(pairs)}: DCIL's std {span(dcil)}, DPF's {span(dpf)} points",
        ),
    ]
    ratios = cost_ratios(ours, pairs)
    if ratios:
        conditions = "on the same hardware with as many runs at once"
        text = f"{statistics.median(ratios):.2f} × DPF's {conditions} (median of {len(ratios)}; {span(ratios)})"
        rows.append(("Time of an epoch of DCIL", text))
    return rows


def cost_ratios(ours: Measurements, pairs: Sequence[Pair]) -> list[float]:
    """Return the epoch times of DCIL relative to DPF wherever both ran under the same conditions."""
    ratios = []
    for pair in pairs:
        dcil, dpf = (median_epoch_times(ours.records_of(cell)) for cell in pair)
        ratios += [dcil[where] / dpf[where] for where in dcil if where in dpf]
    return ratios


def gpu_hours(records: Iterable[Record]) -> float:
    """Return the device time of runs: an epoch beside three others takes a quarter of the device."""
    seconds = 0.0
    for record in records:
        shares = [time / at_once for (_, at_once), time in record.seconds_per_epoch().items()]
        seconds += statistics.fmean(shares) * len(record.column("seconds")) if shares else 0.0
    return seconds / 3600


def span(values: Sequence[float]) -> str:
    """Format the least and the greatest value."""
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} to {high}"
