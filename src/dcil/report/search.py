"""The part of the report on a search: its trials, what was stopped when, and which settings matter."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcil.report.formatting import NONE, number
from dcil.report.measure import ACCURACY, LOSS, Measure
from dcil.report.page import Block, Heading, Paragraph, Picture, Table, TableRow
from dcil.report.theme import COLOURS, is_narrow, log_ticks, picture
from dcil.runs.printable import printable
from dcil.runs.read import RecordedRun
from dcil.train.search_record import COMPLETE, FAILED, STOPPED, SearchRecord, Trial, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEWEST = 4  # trials from which on it is said what matters
MOST_PANELS = 6


@dataclass(frozen=True)
class Scored:
    """A trial with its score after each epoch, of which higher is better, and its sparsity after the last."""

    trial: Trial
    scores: tuple[float, ...]
    sparsity: float | None = None

    def at(self, epoch: int) -> float:
        """Return the score after ``epoch`` epochs, or after the last one before; a failed trial is the worst."""
        if self.trial.ended == FAILED or not self.scores:
            return float("-inf")
        return self.scores[min(epoch, len(self.scores)) - 1]


@dataclass(frozen=True)
class Influence:
    """The share of the variance of the scores' ranks that a setting explains alone, and which values are better."""

    name: str
    share: float
    better: str


def blocks(runs: Sequence[RecordedRun]) -> list[Block]:
    """Return what there is to say where the runs are the trials of a search."""
    parents = {run.folder.parent for run in runs}
    record = read(parents.pop()) if len(parents) == 1 else None
    if record is None:
        return []
    measure = ACCURACY if record.score == "top1" else LOSS
    by_name = {run.folder.name: run for run in runs}
    begun = [(trial, by_name[trial.name]) for trial in record.trials if trial.name in by_name]
    found = [Scored(trial, scores(run, measure), run.sparsity) for trial, run in begun]
    found.sort(key=lambda one: (one.trial.ended == COMPLETE, one.at(one.trial.epochs)), reverse=True)
    page: list[Block] = [Heading("The search"), Paragraph(lead(record)), trials_table(record, found, measure)]
    if len(found) >= FEWEST:
        page += [Paragraph(basis(record, len(found))), influence_table(record, found), values(record, found, measure)]
    return page


def scores(run: RecordedRun, measure: Measure) -> tuple[float, ...]:
    """Return the score after each epoch; one that was not finite is the worst."""
    measured = [measure.at(epoch) for epoch in run.epochs]
    return tuple(float("-inf") if value is None else measure.sign * value for value in measured)


def lead(record: SearchRecord) -> str:
    count = {ended: sum(trial.ended == ended for trial in record.trials) for ended in (COMPLETE, STOPPED, FAILED)}
    space = "; ".join(f"`{name}` from {values}" for name, values in record.space.items())
    return printable(
        f"{len(record.trials)} trials drew {space}: {count[COMPLETE]} are complete, {count[STOPPED]} were stopped "
        f"early, {count[FAILED]} failed. Asynchronous successive halving looks at a trial after {record.grace}, "
        f"{3 * record.grace}, {9 * record.grace} … epochs and lets about the best third go on."
    )


def trials_table(record: SearchRecord, found: Sequence[Scored], measure: Measure) -> Table:
    """Return the trials, the best first."""
    headings = ("Trial", "Ended", *record.space, "Sparsity", measure.title)
    rows = [
        TableRow(
            (
                printable(one.trial.name),
                ended(one.trial),
                *(shown(one.trial.values[name]) for name in record.space),
                NONE if one.sparsity is None else f"{100 * one.sparsity:.4g} %",
                number(abs(one.scores[-1]), measure.digits) if one.scores and one.at(10**9) > float("-inf") else NONE,
            )
        )
        for one in found
    ]
    return Table(tuple(map(printable, headings)), tuple(rows), 2)


def ended(trial: Trial) -> str:
    if trial.ended == FAILED:
        return printable(f"failed: {trial.reason}")
    return trial.ended if trial.ended == COMPLETE else f"{trial.ended} after epoch {trial.epochs}"


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))


def basis(record: SearchRecord, trials: int) -> str:
    after = f"{record.grace} epoch{'s' if record.grace > 1 else ''}"
    return (
        f"**Which settings matter**, by the {trials} trials after {after}, which all of them have: the share of the "
        "variance of the scores' ranks that a setting explains by itself, for a range by a trend in one direction "
        f"(Spearman's rho squared), for a list by its means (eta squared). Chance alone gives about "
        f"{100 / (trials - 1):.0f} % for a range or a list of two. How the settings work together is not in it."
    )


def influence_table(record: SearchRecord, found: Sequence[Scored]) -> Table:
    """Return the settings, the one that explains most first."""
    every = sorted((influence(record, name, found) for name in record.space), key=lambda one: -one.share)
    rows = [TableRow((printable(one.name), f"{100 * one.share:.0f} %", printable(one.better))) for one in every]
    return Table(("Setting", "Explains", "Better"), tuple(rows), 1)


def influence(record: SearchRecord, name: str, found: Sequence[Scored]) -> Influence:
    """Return the influence of one setting on the scores that all trials have."""
    score = ranks([one.at(record.grace) for one in found])
    given = [one.trial.values[name] for one in found]
    if is_range(record.space[name]):
        rho = correlation(ranks(given), score)
        return Influence(name, rho**2, NONE if not rho else "higher" if rho > 0 else "lower")
    groups = {value: [s for s, other in zip(score, given, strict=True) if other == value] for value in given}
    mean, total = statistics.fmean(score), statistics.pvariance(score) * len(score)
    between = sum(len(group) * (statistics.fmean(group) - mean) ** 2 for group in groups.values())
    best = max(groups, key=lambda value: statistics.fmean(groups[value]))
    return Influence(name, between / total if total else 0.0, shown(best) if total else NONE)


def is_range(text: str) -> bool:
    return ".." in text


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal ones share the mean of theirs."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


def correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Return Pearson's correlation, 0 where one of the two does not vary."""
    return statistics.correlation(x, y) if len(set(x)) > 1 and len(set(y)) > 1 else 0.0


def values(record: SearchRecord, found: Sequence[Scored], measure: Measure) -> Picture:
    """Draw the last score over the values of each setting."""
    names = list(record.space)[:MOST_PANELS]
    drawn = [one for one in found if one.scores and one.at(10**9) > float("-inf")]

    def draw(figure: Figure) -> None:
        shape = (len(names), 1) if is_narrow(figure) else (1, len(names))
        panels: list[Axes] = list(figure.subplots(*shape, sharey=True, squeeze=False).flat)
        for axes, name in zip(panels, names, strict=True):
            for complete in (False, True):
                some = [one for one in drawn if (one.trial.ended == COMPLETE) == complete]
                x = [one.trial.values[name] if is_range(record.space[name]) else shown(one.trial.values[name])
                     for one in some]  # fmt: skip
                y = [abs(one.scores[-1]) for one in some]
                face = COLOURS[0] if complete else "none"
                axes.plot(x, y, "o", color=COLOURS[0], markerfacecolor=face, markersize=5)
            if record.space[name].endswith(":log"):
                log_ticks(axes)
            axes.set_xlabel(printable(name))
        panels[0].set_ylabel(f"last {measure.axis}")

    caption = "A point per trial: filled where it is complete, hollow where it was stopped or is not finished."
    return picture("The values that were drawn", caption, draw, 3.0, narrow_height=2.6 * len(names))
