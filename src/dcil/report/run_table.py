"""The table of runs: one row per run, means over seeds, as text for a terminal or a page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dcil.report.experiments import method_name, settings
from dcil.report.formatting import NONE, bits_per_byte, count, duration, file_size, number, plus_minus, signed
from dcil.report.measure import ACCURACY, LOSS, Measure, measure_of
from dcil.runs.read import RecordedRun

if TYPE_CHECKING:
    from rich.table import Table

HEADINGS = (
    "Run",
    "Data set",
    "Model",
    "Method",
    "Sparsity",
    "Last",
    "vs dense",
    "Best",
    "Std",
    "Bits/byte",
    "Top-1",
    "Loss",
    "Kept",
    "Multiply-adds",
    "File",
    "Time",
)
CONSTANT = ("Data set", "Model")
PAGE_ONLY = ("Bits/byte", "Top-1", "Loss", "Multiply-adds", "File")  # a terminal is narrow, and `dcil eval` prints them
CAPTIONS = {
    ACCURACY: "Accuracy in percent, pruned path.",
    LOSS: "Loss in nats per token, pruned path: lower is better.",
}
FIRST_NUMBER = HEADINGS.index("Sparsity")


@dataclass(frozen=True)
class RunRow:
    """One run, or with ``n`` > 1 the mean over runs that differ only in their seed (``*_spread``: sample std).

    ``last``, ``best``, ``std`` and ``to_dense`` are of what the run is measured by; ``loss`` and, of texts, ``bits``
    per byte and ``top1`` stand beside.
    """

    label: str
    dataset: str
    model: str
    method: str
    sparsity: float | None
    last: float | None
    best: float | None
    std: float | None
    seconds: float
    kept: int | None
    macs: float | None
    file: float | None
    to_dense: float | None
    status: str
    measure: Measure = ACCURACY
    bits: float | None = None
    top1: float | None = None
    loss: float | None = None
    n: int = 1
    last_spread: float | None = None
    best_spread: float | None = None


def rows(runs: Sequence[RecordedRun]) -> list[RunRow]:
    """Return a row per run in the given order; runs that differ only in seed are grouped, their mean follows."""
    groups: dict[str, list[RecordedRun]] = {}
    for run in runs:
        groups.setdefault(settings(run), []).append(run)
    dense = _dense_means(runs)
    table: list[RunRow] = []
    for members in groups.values():
        table.extend(_row(run, dense) for run in members)
        # One run per seed: repeats of a seed would make the spread over seeds look smaller than it is.
        seeds = {run.seed: run for run in reversed(members) if run.complete}
        if len(seeds) > 1:
            table.append(_mean([_row(run, dense) for run in seeds.values()]))
    return table


def _dense_means(runs: Sequence[RecordedRun]) -> dict[tuple[str, ...], float]:
    """Map a task to the mean last value of its finished dense runs."""
    found: dict[tuple[str, ...], list[float]] = {}
    for run in runs:
        last = measure_of(run).last(run)
        if run.dense and run.complete and last is not None:
            found.setdefault(run.task, []).append(last)
    return {key: statistics.fmean(values) for key, values in found.items()}


def _row(run: RecordedRun, dense: dict[tuple[str, ...], float]) -> RunRow:
    measure, text = measure_of(run), run.text
    summary = measure.summary(run)
    reference = dense.get(run.task)
    to_dense = None
    if summary and reference is not None and run.complete and not run.dense:
        to_dense = summary["last"] - reference
    top1, loss = ACCURACY.last(run), LOSS.last(run)
    return RunRow(
        label=run.label,
        dataset=run.dataset,
        model=run.model,
        method=method_name(run),
        sparsity=run.sparsity,
        last=summary["last"] if summary else None,
        best=summary["best"] if summary else None,
        std=summary["std"] if summary else None,
        seconds=run.seconds,
        kept=run.kept,
        macs=run.cost.get("macs_kept"),
        file=run.cost.get("bytes_kept"),
        to_dense=to_dense,
        status=run.status,
        measure=measure,
        bits=bits_per_byte(loss, text) if text and loss is not None else None,
        top1=top1 if text else None,
        loss=None if text else loss,
    )


def _mean(members: Sequence[RunRow]) -> RunRow:
    def mean(values: Sequence[float | None]) -> float | None:
        return statistics.fmean(value for value in values if value is not None) if None not in values else None

    last = [row.last for row in members if row.last is not None]
    best = [row.best for row in members if row.best is not None]
    kept = mean([row.kept for row in members])
    return replace(
        members[0],
        label=f"mean ± std ({len(members)})",
        sparsity=mean([row.sparsity for row in members]),
        last=mean(last),
        best=mean(best),
        std=mean([row.std for row in members]),
        seconds=statistics.fmean(row.seconds for row in members),
        kept=None if kept is None else round(kept),
        macs=mean([row.macs for row in members]),
        file=mean([row.file for row in members]),
        to_dense=mean([row.to_dense for row in members]),
        bits=mean([row.bits for row in members]),
        top1=mean([row.top1 for row in members]),
        loss=mean([row.loss for row in members]),
        n=len(members),
        last_spread=statistics.stdev(last),
        best_spread=statistics.stdev(best),
    )


def cells(row: RunRow) -> tuple[str, ...]:
    """Format the row, one cell per heading."""
    digits = row.measure.digits
    return (
        row.label,
        row.dataset,
        row.model,
        row.method,
        NONE if row.sparsity is None else f"{100 * row.sparsity:.2f} %",
        NONE if row.last is None else plus_minus(row.last, row.last_spread, digits),
        NONE if row.to_dense is None else signed(row.to_dense, digits),
        NONE if row.best is None else plus_minus(row.best, row.best_spread, digits),
        NONE if row.std is None else number(row.std, digits),
        NONE if row.bits is None else number(row.bits, 3),
        NONE if row.top1 is None else number(row.top1),
        NONE if row.loss is None else number(row.loss, 3),
        NONE if row.kept is None else f"{row.kept:,}",
        NONE if row.macs is None else count(row.macs),
        NONE if row.file is None else file_size(row.file),
        duration(row.seconds),
    )


def telling(table: Sequence[RunRow]) -> list[int]:
    """Return the columns to show: no data set and model that all rows share, since the title has them, and no cost or
    further measure that no row has."""
    columns = zip(*map(cells, table), strict=True)
    return [
        index
        for index, (heading, column) in enumerate(zip(HEADINGS, columns, strict=True))
        if not (heading in CONSTANT and len(set(column)) == 1) and not (heading in PAGE_ONLY and set(column) == {NONE})
    ]


def to_rich(table: Sequence[RunRow]) -> Table:
    """Build the table for a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    columns = list(zip(*map(cells, table), strict=True))
    shown = [index for index in telling(table) if HEADINGS[index] not in PAGE_ONLY]
    same = [h for i, h in enumerate(HEADINGS) if h in CONSTANT and i not in shown]
    title = ", ".join(columns[HEADINGS.index(heading)][0] for heading in same)
    captions = [CAPTIONS[measure] for measure in dict.fromkeys(row.measure for row in table)]
    caption = " ".join([*captions, "Std: over the last tenth of the epochs."])
    rich = Table(title=title, caption=caption, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index in shown:
        rich.add_column(HEADINGS[index], justify="right" if index >= FIRST_NUMBER else "left", overflow="fold")
    for row in table:
        texts = [Text(cells(row)[index]) for index in shown]  # Text, not str: a folder may be called "[red]"
        if row.status:
            texts[0].append(f"\n{row.status}", style="yellow")
        rich.add_row(*texts, style="bold" if row.n > 1 else None)
    return rich
