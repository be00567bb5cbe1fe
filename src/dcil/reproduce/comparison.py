"""Ours beside the paper's: which number of ours answers which printed one, and whether it is within two deviations."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dcil.reproduce import paper, tables
from dcil.reproduce.cells import Cell, cell_of
from dcil.reproduce.paper import Row
from dcil.reproduce.records import Record

#: Metric of the paper -> (what it measures, the column it stands in). "single": the paper does not say last or best.
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
class Ours:
    """The records, by cell."""

    records: Sequence[Record]
    by_cell: dict[str, list[Record]] = field(init=False)

    def __post_init__(self) -> None:
        self.by_cell = {}
        for record in self.records:
            self.by_cell.setdefault(record.cell, []).append(record)

    def of(self, cell: Cell) -> list[Record]:
        return self.by_cell.get(cell.id, [])

    def values(self, cell: Cell, quantity: str, column: str) -> list[float]:
        """A number per seed; none where something that it needs was not run."""
        records = self.of(cell)
        if quantity.startswith("std"):
            return [record.std for record in records]
        if quantity.startswith("time"):
            return self.times(cell)
        pick = {
            ("top-1", "last"): lambda r: r.last,
            ("top-1", "best"): lambda r: r.best,
            ("top-5", "last"): lambda r: r.column("top5")[-1],
            ("top-5", "best"): lambda r: r.best_top5,
        }
        kind = quantity.partition(" ")[0]
        found = [float(pick[kind, column](record)) for record in records]
        if not quantity.endswith("minus dense"):
            return found
        dense = [float(pick[kind, "last"](record)) for record in self.of(cell.dense)]
        return [value - statistics.fmean(dense) for value in found] if dense else []

    def times(self, cell: Cell) -> list[float]:
        """Whole training time of each run, relative to DPF with fine-tuning on the same hardware, beside as many."""
        reference = self.of(dataclasses.replace(cell, method="dpf", kl=True, target=None, finetune=60))
        beside = paces(reference)
        found: list[float] = []
        for record in self.of(cell):
            ratios = [seconds / beside[where] for where, seconds in record.pace().items() if where in beside]
            if ratios:
                epochs = [len(r.column("top1")) for r in (record, reference[0])]
                found.append(statistics.median(ratios) * epochs[0] / epochs[1])
        return found


def paces(records: Iterable[Record]) -> dict[tuple[str, int], float]:
    """(hardware, runs at once) -> seconds per epoch, the median over the records."""
    found: dict[tuple[str, int], list[float]] = {}
    for record in records:
        for where, seconds in record.pace().items():
            found.setdefault(where, []).append(seconds)
    return {where: statistics.median(values) for where, values in found.items()}


@dataclass(frozen=True)
class Line:
    """A line of a table: one network and method, one quantity, by last and by best epoch."""

    cells: tuple[Cell, ...]
    model: str
    method: str
    sparsity: float
    variant: str
    quantity: str
    paper: dict[str, Row]
    ours: dict[str, list[float]]
    to_dense: list[float]
    notes: tuple[str, ...]

    @property
    def runs(self) -> int:
        return max(map(len, self.ours.values()))

    def mark(self, column: str) -> str:
        """within, above or below the paper's mean ± 2 std; nothing where one side is missing."""
        row, ours = self.paper.get(column), self.ours[column]
        if row is None or row.mean is None or row.std is None or not ours:
            return ""
        off = statistics.fmean(ours) - row.mean
        if abs(off) <= 2 * row.std + 1e-9:
            return "within"
        return "above" if off > 0 else "below"


def lines(table: str, ours: Ours) -> list[Line]:
    """The lines of one of the paper's tables, in its order."""
    groups: dict[tuple[str, str, float, str, str, str], dict[str, Row]] = {}
    for row in paper.rows():
        if row.table == table:
            quantity, column = QUANTITIES[row.metric]
            column = "best" if row.basis == "best" else column
            key = (row.model or "", row.method, row.sparsity, variant(row), quantity, row.dense_source)
            groups.setdefault(key, {})[column] = row
    return [line(key[4], found, ours) for key, found in groups.items()]


def line(quantity: str, rows: dict[str, Row], ours: Ours) -> Line:
    row = next(iter(rows.values()))
    models = tables.SHARED_MODELS if row.model is None else (row.model,)
    cells = tuple(cell for model in models if (cell := cell_of(row, model)) is not None)
    values = {c: [ours.values(cell, quantity, c) for cell in cells] for c in COLUMNS}
    plain = quantity == "top-1" and cells[0] != cells[0].dense
    return Line(
        cells=cells,
        model=" and ".join(models),
        method=row.method,
        sparsity=row.sparsity,
        variant=variant(row),
        quantity=quantity,
        paper=rows,
        # A row that stands for two networks needs both.
        ours={c: [v for one in found for v in one] if all(found) else [] for c, found in values.items()},
        to_dense=ours.values(cells[0], "top-1 minus dense", "last") if plain else [],
        notes=tuple(dict.fromkeys(n for cell in cells for r in ours.of(cell) for n in r.raw["summary"]["notes"])),
    )


def variant(row: Row) -> str:
    """What sets a row apart in the studies of warm-up and convergence."""
    words = []
    if row.warmup_epochs is not None:
        words.append(f"KL from epoch {row.warmup_epochs}")
    if row.target_epoch is not None:
        words.append(f"target epoch {row.target_epoch}")
    if row.finetune_epochs:
        words.append(f"{row.finetune_epochs} epochs of fine-tuning")
    if row.dense_source:
        words.append(f"as in {row.dense_source}")
    return ", ".join(words)
