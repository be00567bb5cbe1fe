"""Comparison with the paper: the measurements for each printed number, and whether they are within two deviations."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dcil.reproduce import paper, tables
from dcil.reproduce.cells import Cell
from dcil.reproduce.paper import PrintedNumber
from dcil.reproduce.records import Record

#: Metric of the paper -> (quantity, column).
QUANTITIES = {
    "top1": ("top-1", "last"),
    "top1_last": ("top-1", "last"),
    "top1_best": ("top-1", "best"),
    "top5": ("top-5", "last"),
    "top5_last": ("top-5", "last"),
    "top5_best": ("top-5", "best"),
    "top1_diff": ("top-1 minus dense", "last"),
    "top5_diff": ("top-5 minus dense", "last"),
    "std_last_10pct": ("std of the last 10 % of epochs", "last"),
    "relative_time": ("time / DPF with 300 + 60 epochs", "last"),
}
COLUMNS = ("last", "best")


@dataclass
class Measurements:
    """Records by cell, and the quantities computed from them."""

    records: Sequence[Record]
    by_cell: dict[str, list[Record]] = field(init=False)

    def __post_init__(self) -> None:
        self.by_cell = {}
        for record in self.records:
            self.by_cell.setdefault(record.cell, []).append(record)

    def records_of(self, cell: Cell) -> list[Record]:
        return self.by_cell.get(cell.id, [])

    def values(self, cell: Cell, quantity: str, column: str) -> list[float]:
        """Return a number per seed; none where a run that it needs is missing."""
        records = self.records_of(cell)
        if quantity.startswith("std"):
            return [record.std for record in records]
        if quantity.startswith("time"):
            return self.relative_times(cell)
        pick = {
            ("top-1", "last"): lambda r: r.last,
            ("top-1", "best"): lambda r: r.best,
            ("top-5", "last"): lambda r: r.column("top5")[-1],
            ("top-5", "best"): lambda r: r.best_top5,
            ("loss", "last"): lambda r: r.last_loss,
            ("loss", "best"): lambda r: r.best_loss,
        }
        kind = quantity.partition(" ")[0]
        values = [float(pick[kind, column](record)) for record in records]
        if not quantity.endswith("minus dense"):
            return values
        dense = [float(pick[kind, "last"](record)) for record in self.records_of(cell.dense)]
        return [value - statistics.fmean(dense) for value in values] if dense else []

    def relative_times(self, cell: Cell) -> list[float]:
        """Return the training time of each run relative to DPF with fine-tuning, on equal hardware and runs at once."""
        reference = self.records_of(dataclasses.replace(cell, method="dpf", kl=True, target=None, finetune=60))
        of_reference = median_epoch_times(reference)
        times: list[float] = []
        for record in self.records_of(cell):
            measured = record.seconds_per_epoch().items()
            ratios = [seconds / of_reference[where] for where, seconds in measured if where in of_reference]
            if ratios:
                epochs = [len(r.column("top1")) for r in (record, reference[0])]
                times.append(statistics.median(ratios) * epochs[0] / epochs[1])
        return times


def median_epoch_times(records: Iterable[Record]) -> dict[tuple[str, int], float]:
    """Map (hardware, runs at once) to seconds per epoch, the median over the records."""
    measured: dict[tuple[str, int], list[float]] = {}
    for record in records:
        for where, seconds in record.seconds_per_epoch().items():
            measured.setdefault(where, []).append(seconds)
    return {where: statistics.median(values) for where, values in measured.items()}


@dataclass(frozen=True)
class ComparisonRow:
    """A row of a table: one network and method, one quantity, at the last and at the best epoch."""

    cells: tuple[Cell, ...]
    model: str
    method: str
    sparsity: float
    variant: str
    quantity: str
    paper: dict[str, PrintedNumber]
    ours: dict[str, list[float]]
    to_dense: list[float]
    notes: tuple[str, ...]

    @property
    def runs(self) -> int:
        return max(map(len, self.ours.values()))

    def verdict(self, column: str) -> str:
        """Return within, above or below for the paper's mean ± 2 std; the empty string where one side is missing."""
        printed, ours = self.paper.get(column), self.ours[column]
        if printed is None or printed.mean is None or printed.std is None or not ours:
            return ""
        difference = statistics.fmean(ours) - printed.mean
        if abs(difference) <= 2 * printed.std + 1e-9:
            return "within"
        return "above" if difference > 0 else "below"

    def verdict_in_words(self, column: str) -> str:
        """Return the verdict, and for a number outside how far beyond the two deviations it is."""
        verdict, printed = self.verdict(column), self.paper[column]
        if verdict == "within" or printed.mean is None or printed.std is None:
            return f"{column} {verdict}"
        beyond = abs(statistics.fmean(self.ours[column]) - printed.mean) - 2 * printed.std
        return f"{column} {verdict} ({beyond:.{3 if self.quantity.startswith('std') else 2}f} beyond)"


def comparison_rows(table: str, ours: Measurements) -> list[ComparisonRow]:
    """Return the rows of one of the paper's tables, in its order."""
    groups: dict[tuple[str, str, float, str, str, str], dict[str, PrintedNumber]] = {}
    for number in paper.numbers():
        if number.table == table:
            quantity, column = QUANTITIES[number.metric]
            column = "best" if number.basis == "best" else column
            key = (number.model or "", number.method, number.sparsity, variant(number), quantity, number.dense_source)
            groups.setdefault(key, {})[column] = number
    return [comparison_row(key[4], numbers, ours) for key, numbers in groups.items()]


def comparison_row(quantity: str, numbers: dict[str, PrintedNumber], ours: Measurements) -> ComparisonRow:
    """Put the measurements of one quantity beside its printed numbers, by column."""
    number = next(iter(numbers.values()))
    cells = tuple(tables.cells_for(number))
    values = {c: [ours.values(cell, quantity, c) for cell in cells] for c in COLUMNS}
    pruned_top1 = quantity == "top-1" and cells[0] != cells[0].dense
    notes = (note for cell in cells for r in ours.records_of(cell) for note in r.raw["summary"]["notes"])
    return ComparisonRow(
        cells=cells,
        model=" and ".join(tables.SHARED_MODELS) if number.model is None else number.model,
        method=number.method,
        sparsity=number.sparsity,
        variant=variant(number),
        quantity=quantity,
        paper=numbers,
        # A number of two networks needs the runs of both.
        ours={c: [v for one in by_cell for v in one] if all(by_cell) else [] for c, by_cell in values.items()},
        to_dense=ours.values(cells[0], "top-1 minus dense", "last") if pruned_top1 else [],
        notes=tuple(dict.fromkeys(notes)),
    )


def variant(number: PrintedNumber) -> str:
    """Name the settings that distinguish a number in the studies of warm-up and convergence."""
    words = []
    if number.warmup_epochs is not None:
        words.append(f"KL from epoch {number.warmup_epochs}")
    if number.target_epoch is not None:
        words.append(f"target epoch {number.target_epoch}")
    if number.finetune_epochs:
        words.append(f"{number.finetune_epochs} epochs of fine-tuning")
    if number.dense_source:
        words.append(f"as in {number.dense_source}")
    return ", ".join(words)
