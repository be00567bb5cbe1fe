"""Figures of what pruning costs: accuracy or loss against sparsity, and against multiply-adds and file size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcil.report.experiments import Experiment, method_name, settings
from dcil.report.measure import measure_of
from dcil.report.page import Picture
from dcil.report.theme import BAND, INK, Style, is_narrow, log_ticks, picture, styles
from dcil.runs.read import RecordedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_TICKS = 8


@dataclass(frozen=True)
class Point:
    """An experiment in a figure: where, how accurate, and the spread over its seeds."""

    x: float
    y: float
    spread: float


def pictures(experiments: Sequence[Experiment], style: Mapping[str, Style]) -> list[Picture]:
    """Draw accuracy, or loss, against sparsity and against cost for each task that compares something."""
    drawn: list[Picture] = []
    complete = [one for one in experiments if one.first.complete and one.mean(measure_of(one.first).last) is not None]
    tasks = dict.fromkeys(one.first.task for one in complete)
    for task in tasks:
        members = [one for one in complete if one.first.task == task]
        name = f": {task[0]} on {members[0].first.dataset}" if len(tasks) > 1 else ""
        pruned = [one for one in members if not one.first.dense and one.first.sparsity]
        if len({round(one.first.sparsity or 0.0, 3) for one in pruned}) > 1:
            drawn.append(by_sparsity(name, pruned, [one for one in members if one.first.dense]))
        if len(costed := [one for one in members if one.mean(macs)]) > 1:
            drawn.append(by_cost(name, costed, style))
    return drawn


def macs(run: RecordedRun) -> float | None:
    return run.cost.get("macs_kept")


def file_bytes(run: RecordedRun) -> float | None:
    return run.cost.get("bytes_kept")


#: Label of the axis, value, unit.
COSTS = (("multiply-adds per input, millions", macs, 1e6), ("size as a sparse file, KiB", file_bytes, 1024))


def by_sparsity(task: str, pruned: Sequence[Experiment], dense: Sequence[Experiment]) -> Picture:
    """Draw the last accuracy or loss over the share of weights that is kept, a line per method."""
    measure = measure_of(pruned[0].first)
    lines = series(pruned)
    style = styles(list(lines))
    reference = [one.mean(measure.last) for one in dense]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for level in reference[:1]:
            assert level is not None
            axes.axhline(level, color=INK, linewidth=0.9, alpha=0.55, linestyle=(0, (4, 3)))
            axes.text(1, level, "dense ", ha="right", va="bottom", transform=axes.get_yaxis_transform(), fontsize=8.5)
        for label, points in lines.items():
            plot_points(axes, points, style[label], "-")
        axes.set_xscale("log")
        axes.invert_xaxis()
        ticks = sorted({round(point.x, 2) for points in lines.values() for point in points})
        if len(ticks) > MOST_TICKS:
            ticks = ticks[:: -(-len(ticks) // MOST_TICKS)]
        axes.set_xticks(ticks, [f"{100 - kept:.4g} %" for kept in ticks])
        axes.minorticks_off()
        axes.set_xlabel("sparsity")
        axes.set_ylabel(f"last {measure.axis}")

    bands = " Bands: ± the standard deviation over seeds." if any(len(one.runs) > 1 for one in pruned) else ""
    worsens = "the accuracy falls" if measure.sign > 0 else "the loss rises"
    caption = f"How much can go before {worsens}. Halving what is left has the same width anywhere on the axis."
    return picture(f"{measure.word} against sparsity{task}", caption + bands, draw, 3.9, list(style.values()))


def series(experiments: Sequence[Experiment]) -> dict[str, list[Point]]:
    """Return the points of each line: experiments that differ only in their sparsity."""
    groups: dict[str, list[Experiment]] = {}
    for one in experiments:
        groups.setdefault(settings(one.first, frozenset({"sparsity"})), []).append(one)
    names = [method_name(group[0].first) for group in groups.values()]
    lines: dict[str, list[Point]] = {}
    for group, name in zip(groups.values(), names, strict=True):
        label = name if names.count(name) == 1 else f"{name}: {group[0].first.label} …"
        points = [Point(100 * (1 - (one.first.sparsity or 0.0)), *_accuracy(one)) for one in group]
        lines[label] = sorted((point for point in points if point.x > 0), key=lambda point: -point.x)
    return {label: points for label, points in lines.items() if points}


def by_cost(task: str, experiments: Sequence[Experiment], style: Mapping[str, Style]) -> Picture:
    """Draw accuracy or loss over multiply-adds and over the size of a sparse file, a point per experiment."""
    measure = measure_of(experiments[0].first)

    def draw(figure: Figure) -> None:
        panels = figure.subplots(2, 1) if is_narrow(figure) else figure.subplots(1, 2, sharey=True)
        for axes, (label, value, unit) in zip(panels, COSTS, strict=True):
            for one in experiments:
                x = one.mean(value)
                assert x is not None
                plot_points(axes, [Point(x / unit, *_accuracy(one))], style[one.label], "")
            axes.set_xlabel(label)
            log_ticks(axes)
        for axes in panels[: 2 if is_narrow(figure) else 1]:
            axes.set_ylabel(f"last {measure.axis}")

    better = "up" if measure.sign > 0 else "down"
    caption = f"What is left to compute and to store, where zeros are skipped: {better} and to the left is better."
    key = [style[one.label] for one in experiments]
    return picture(f"{measure.word} against cost{task}", caption, draw, 3.3, key, narrow_height=5.2)


def _accuracy(one: Experiment) -> tuple[float, float]:
    mean, spread = one.spread(measure_of(one.first).last)
    assert mean is not None
    return mean, spread


def plot_points(axes: Axes, points: Sequence[Point], style: Style, line: str) -> None:
    """Plot points, joined by ``line``, with a band or, for one point, a bar where seeds differ."""
    x, y = [point.x for point in points], [point.y for point in points]
    low, high = ([point.y + sign * point.spread for point in points] for sign in (-1, 1))
    if len(points) > 1:
        axes.fill_between(x, low, high, color=style.colour, alpha=BAND, linewidth=0)
    else:
        axes.vlines(x, low, high, color=style.colour, linewidth=1.2, alpha=0.6)
    axes.plot(x, y, line, color=style.colour, marker=style.marker or "o", markersize=5, linewidth=1.7)
