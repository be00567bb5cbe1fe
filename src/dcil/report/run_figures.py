"""Figures of the run report: accuracy or loss, sparsity and mask flips over time, and sparsity by layer.

Each experiment is a line, with a band of one standard deviation over its seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dcil.report.experiments import Experiment
from dcil.report.measure import Measure, measure_of, measures_of
from dcil.report.page import Picture
from dcil.report.theme import BAND, Style, is_narrow, log_scale, picture, plot_line, whole_ticks
from dcil.runs.read import EpochMetrics, MaskUpdate, RecordedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_POINTS = 200
STRIPE = 4.0  # length of a stripe, in line widths
DOT: dict[str, Any] = {"markersize": 4.2, "markeredgewidth": 0, "alpha": 0.9, "clip_on": False}
UNFINISHED_NOTE = " Unfinished runs are left out: their layers are counted at the end."


def pictures(experiments: Sequence[Experiment], style: Mapping[str, Style]) -> list[Picture]:
    """Draw every figure that has something to show."""
    started = [one for one in experiments if one.first.epochs]
    pruned = [one for one in started if not one.first.dense]
    counted = [one for one in pruned if one.first.layers]
    drawn = [
        curves(measure, [one for one in started if measure_of(one.first) == measure], style)
        for measure in measures_of(one.first for one in started)
    ]
    if pruned:
        drawn.append(sparsity(pruned, style))
    note = UNFINISHED_NOTE if len(counted) < len(pruned) else ""
    moved = [one for one in counted if any(update.revived or update.dropped for update in one.first.updates)]
    if moved:
        drawn.append(flips(moved, style, note))
    models = dict.fromkeys(one.first.model for one in counted)
    drawn += [layers([one for one in counted if one.first.model == model], style, note) for model in models]
    return drawn


def curves(measure: Measure, experiments: Sequence[Experiment], style: Mapping[str, Style]) -> Picture:
    """Draw accuracy or loss by epoch: pruned path solid, super path dotted."""
    runs = [run for one in experiments for run in one.runs]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for one in experiments:
            curve, look = _where_all_have_it(one, measure.at), style[one.label]
            means = [statistics.fmean(values) for values in curve.values()]
            if len(one.runs) > 1:
                spread = [statistics.stdev(values) for values in curve.values()]
                low, high = ([m + sign * s for m, s in zip(means, spread, strict=True)] for sign in (-1, 1))
                axes.fill_between(list(curve), low, high, color=look.colour, alpha=BAND, linewidth=0)
            plot_line(axes, list(curve), means, look, 1.7 if len(experiments) <= 6 else 1.2)
            if beside := _where_all_have_it(one, measure.super):
                means = [statistics.fmean(values) for values in beside.values()]
                axes.plot(list(beside), means, color=look.colour, linewidth=1.1, linestyle=(0, (1, 1.6)))
        axes.set_ylim(*_limits(measure, runs))
        _by_epoch(axes, runs, measure.axis)

    begins = "starts at the lowest" if measure.sign > 0 else "ends at the highest"
    caption = (
        "Look at how steady a line is as well as where it ends. "
        f"The axis {begins} point after the first tenth of the epochs, so every later dip is in view."
    )
    if any(_where_all_have_it(one, measure.super) for one in experiments):
        caption += " Dotted: the super path, which sees all weights."
    if any(len(one.runs) > 1 for one in experiments):
        caption += " Bands: ± the standard deviation over seeds."
    return picture(f"{measure.title} by epoch", caption, draw, 4.4, _key(experiments, style))


def _where_all_have_it(one: Experiment, pick: Callable[[EpochMetrics], float | None]) -> dict[int, list[float]]:
    """Map epoch -> a value per run, for the epochs in which every run has one."""
    found: dict[int, list[float]] = {}
    for row in zip(*(run.epochs for run in one.runs), strict=False):
        values = [value for epoch in row if (value := pick(epoch)) is not None]
        if len(values) == len(one.runs):
            found[row[0].epoch] = values
    return found


def _key(experiments: Sequence[Experiment], style: Mapping[str, Style]) -> list[Style]:
    return [style[one.label] for one in experiments]


def _limits(measure: Measure, runs: Sequence[RecordedRun]) -> tuple[float, float]:
    """Return the worst value after the first tenth of the epochs (all start near chance) and the best of all, in the
    order of the axis."""
    seen, settled = [], []
    for run in runs:
        curve = [[v for v in (measure.at(epoch), measure.super(epoch)) if v is not None] for epoch in run.epochs]
        seen += [value for values in curve for value in values]
        settled += [value for values in curve[len(curve) // 10 :] for value in values]
    if measure.sign < 0:
        low, high = min(seen, default=0.0), max(settled, default=1.0)
        room = max(0.06 * (high - low), 0.01)
        return max(low - room, 0.0), high + room
    low, high = min(settled, default=0.0), max(seen, default=100.0)
    room = max(0.06 * (high - low), 0.5)
    return max(low - room, -1.0), min(high + room, 101.0)


def sparsity(experiments: Sequence[Experiment], style: Mapping[str, Style]) -> Picture:
    """Draw sparsity by epoch; experiments that coincide share one line, striped in their colours."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for together in _coinciding(experiments):
            for index, one in enumerate(together):
                curve = [100 * epoch.sparsity for epoch in one.first.epochs]
                line = plot_line(axes, _epochs(one.first), curve, style[one.label], 2.2)
                if index:  # the first stays solid and shows between the stripes of the others
                    line.set_linestyle((-STRIPE * index, (STRIPE, STRIPE * (len(together) - 1))))
        axes.set_ylim(bottom=0)
        _by_epoch(axes, [one.first for one in experiments], "pruned weights, %")

    caption = "How fast each run was pruned; runs with the same schedule share one line, striped in their colours."
    return picture("Sparsity by epoch", caption, draw, 2.8, _key(experiments, style))


def _coinciding(experiments: Sequence[Experiment]) -> list[list[Experiment]]:
    """Group experiments whose curves are equal over the epochs that both have."""
    groups: list[list[Experiment]] = []
    # The longest first: it is the one under the stripes.
    for one in sorted(experiments, key=lambda one: -len(one.first.epochs)):
        for group in groups:
            # An unfinished run is compared with its part.
            pairs = zip(group[0].first.epochs, one.first.epochs, strict=False)
            if all(abs(a.sparsity - b.sparsity) < 0.005 for a, b in pairs):
                group.append(one)
                break
        else:
            groups.append([one])
    return groups


def flips(experiments: Sequence[Experiment], style: Mapping[str, Style], note: str = "") -> Picture:
    """Draw the weights revived and dropped per mask update, as shares of the prunable weights, mean over seeds."""

    def draw(figure: Figure) -> None:
        shape = (2, 1) if is_narrow(figure) else (1, 2)
        panels = figure.subplots(*shape, sharex=True, sharey=True)
        drawn: list[float] = []
        for axes, name in zip(panels, ("revived", "dropped"), strict=True):
            for one in experiments:
                steps, shares = _shares(one, name)
                drawn += [share for share in shares if share > 0]
                plot_line(axes, steps, shares, style[one.label], 1.3)
            whole_ticks(axes, 6)
            axes.set_title(name, loc="left", fontsize=10)
            axes.set_xlabel("training step")
            axes.set_ylabel("weights per update, %")
            axes.label_outer()
        log_scale(panels[0], drawn)

    caption = (
        "Share of the prunable weights that each mask update brings back (revived) and takes away (dropped), log "
        "scale: look for lines that fall as the mask settles."
    )
    return picture("Mask flips per update", caption + note, draw, 3.1, _key(experiments, style), narrow_height=5)


def _shares(one: Experiment, name: str) -> tuple[list[float], list[float]]:
    """Return steps and the mean share of weights changed over the runs, NaN where none were."""
    steps: list[float] = []
    columns: list[list[float]] = []
    for run in one.runs:
        total = sum(layer.weights for layer in run.layers.values())
        steps, counts = _binned(run.updates, name)
        columns.append([100 * count / total for count in counts])
    means = [statistics.fmean(values) for values in zip(*columns, strict=False)]
    return steps[: len(means)], [mean if mean > 0 else math.nan for mean in means]


def _binned(updates: Sequence[MaskUpdate], name: str) -> tuple[list[float], list[float]]:
    """Return steps and counts, averaged over neighbours where there are more updates than a figure can show."""
    size = -(-len(updates) // MAX_POINTS)
    bins = [updates[start : start + size] for start in range(0, len(updates), size)]
    steps = [sum(update.step for update in part) / len(part) for part in bins]
    return steps, [sum(getattr(update, name) for update in part) / len(part) for part in bins]


def layers(experiments: Sequence[Experiment], style: Mapping[str, Style], note: str = "") -> Picture:
    """Draw the sparsity of every layer of one model: a row per layer in network order, a dot per experiment."""
    names = list(dict.fromkeys(name for one in experiments for name in one.first.layers))
    row = {name: index for index, name in enumerate(names)}

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        lowest = 100.0
        for index, one in enumerate(experiments):
            # A small offset within the row keeps runs that prune a layer alike from hiding each other.
            shift = 0.5 * (index - (len(experiments) - 1) / 2) / max(len(experiments) - 1, 1)
            found = {name: [run.layers[name].sparsity for run in one.runs if name in run.layers] for name in names}
            x = {name: 100 * statistics.fmean(values) for name, values in found.items() if values}
            lowest = min(lowest, *x.values())
            look, y = style[one.label], {name: row[name] + shift for name in x}
            axes.plot(list(x.values()), list(y.values()), look.marker or "o", **DOT, color=look.colour)
            for name in x:
                if max(found[name]) >= 1:
                    axes.plot(100, y[name], "o", markersize=8, markerfacecolor="none", color=look.colour, clip_on=False)
        axes.set_xlim(max(10 * (lowest // 10), 0), 100)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("pruned weights, %")

    height = 0.8 + len(names) * (0.19 if len(names) <= 40 else 0.155)
    caption = "Layers from input (top) to output; a ring at 100 % is a layer that lost every weight"
    caption += ", with one seed or more." if any(len(one.runs) > 1 for one in experiments) else "."
    title = f"Sparsity by layer: {experiments[0].first.model}"
    return picture(title, caption + note, draw, height, _key(experiments, style), narrow_height=height)


def _epochs(run: RecordedRun) -> list[float]:
    return [epoch.epoch for epoch in run.epochs]


def _by_epoch(axes: Axes, runs: Sequence[RecordedRun], label: str) -> None:
    axes.set_xlim(0, max(len(run.epochs) for run in runs) + 0.5)
    whole_ticks(axes, 10)
    axes.set_xlabel("epoch")
    axes.set_ylabel(label)
