"""Figures of the run report: accuracy, sparsity and mask flips over time, and sparsity by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dcil.report.page import Picture
from dcil.report.theme import Style, log_scale, picture, plot_line, whole_ticks
from dcil.runs.read import MaskUpdate, RecordedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_POINTS = 200
STRIPE = 4.0  # length of a stripe, in line widths
UNFINISHED_NOTE = " Unfinished runs are left out: their layers are counted at the end."


def pictures(runs: Sequence[RecordedRun], style: dict[str, Style]) -> list[Picture]:
    """Draw every figure that has something to show."""
    started = [run for run in runs if run.epochs]
    pruned = [run for run in started if not run.dense]
    counted = [run for run in pruned if run.layers]
    drawn: list[Picture] = []
    if started:
        drawn.append(accuracy(started, style))
    if pruned:
        drawn.append(sparsity(pruned, style))
    note = UNFINISHED_NOTE if len(counted) < len(pruned) else ""
    moved = [run for run in counted if any(update.revived or update.dropped for update in run.updates)]
    if moved:
        drawn.append(flips(moved, style, note))
    models = dict.fromkeys(run.model for run in counted)
    drawn += [layers([run for run in counted if run.model == model], style, note) for model in models]
    return drawn


def accuracy(runs: Sequence[RecordedRun], style: dict[str, Style]) -> Picture:
    """Draw test accuracy by epoch: pruned path solid, super path dotted."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for run in runs:
            curve = [epoch.top1 for epoch in run.epochs]
            plot_line(axes, _epochs(run), curve, style[run.label], 1.7 if len(runs) <= 6 else 1.2)
            beside = [(epoch.epoch, epoch.top1_super) for epoch in run.epochs if epoch.top1_super is not None]
            if beside:
                x, y = zip(*beside, strict=True)
                axes.plot(x, y, color=style[run.label].colour, linewidth=1.1, linestyle=(0, (1, 1.6)))
        axes.set_ylim(*_limits(runs))
        _by_epoch(axes, runs, "test accuracy, %")

    has_super = any(epoch.top1_super is not None for run in runs for epoch in run.epochs)
    dotted = " Dotted: the super path, which sees all weights." if has_super else ""
    caption = (
        "Look at how steady a line is as well as where it ends. "
        "The axis starts at the lowest point after the first tenth of the epochs, so every later dip is in view."
    )
    return picture("Test accuracy by epoch", f"{caption}{dotted}", draw, 4.4, [style[run.label] for run in runs])


def _limits(runs: Sequence[RecordedRun]) -> tuple[float, float]:
    """Return the lowest accuracy after the first tenth of the epochs (all start near chance) and the highest of all."""
    seen, settled = [], []
    for run in runs:
        curve = [(epoch.top1, epoch.top1 if epoch.top1_super is None else epoch.top1_super) for epoch in run.epochs]
        seen += [value for pair in curve for value in pair]
        settled += [value for pair in curve[len(curve) // 10 :] for value in pair]
    low, high = min(settled), max(seen)
    room = max(0.06 * (high - low), 0.5)
    return max(low - room, -1.0), min(high + room, 101.0)


def sparsity(runs: Sequence[RecordedRun], style: dict[str, Style]) -> Picture:
    """Draw sparsity by epoch; runs that coincide share one line, striped in their colours."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for together in _coinciding(runs):
            for index, run in enumerate(together):
                curve = [100 * epoch.sparsity for epoch in run.epochs]
                line = plot_line(axes, _epochs(run), curve, style[run.label], 2.2)
                if index:  # the first stays solid and shows between the stripes of the others
                    line.set_linestyle((-STRIPE * index, (STRIPE, STRIPE * (len(together) - 1))))
        axes.set_ylim(bottom=0)
        _by_epoch(axes, runs, "pruned weights, %")

    caption = "How fast each run was pruned; runs with the same schedule share one line, striped in their colours."
    return picture("Sparsity by epoch", caption, draw, 2.8, [style[run.label] for run in runs])


def _coinciding(runs: Sequence[RecordedRun]) -> list[list[RecordedRun]]:
    """Group runs whose curves are equal over the epochs that both have."""
    groups: list[list[RecordedRun]] = []
    for run in sorted(runs, key=lambda run: -len(run.epochs)):  # the longest first: it is the one under the stripes
        for group in groups:
            pairs = zip(group[0].epochs, run.epochs, strict=False)  # an unfinished run is compared with its part
            if all(abs(a.sparsity - b.sparsity) < 0.005 for a, b in pairs):
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def flips(runs: Sequence[RecordedRun], style: dict[str, Style], note: str = "") -> Picture:
    """Draw the weights revived and dropped per mask update, as shares of the prunable weights."""

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        drawn: list[float] = []
        for axes, name in zip(panels, ("revived", "dropped"), strict=True):
            for run in runs:
                total = sum(layer.weights for layer in run.layers.values())
                steps, counts = _binned(run.updates, name)
                shares = [100 * count / total if count > 0 else math.nan for count in counts]
                drawn += [share for share in shares if share > 0]
                plot_line(axes, steps, shares, style[run.label], 1.3)
            whole_ticks(axes, 6)
            axes.set_xlabel("training step")
            axes.set_title(name, loc="left", fontsize=10)
        panels[0].set_ylabel("weights per update, %")
        log_scale(panels[0], drawn)

    caption = (
        "Share of the prunable weights that each mask update brings back (left) and takes away (right), log scale: "
        "look for lines that fall as the mask settles."
    )
    return picture("Mask flips per update", caption + note, draw, 3.1, [style[run.label] for run in runs])


def _binned(updates: Sequence[MaskUpdate], name: str) -> tuple[list[float], list[float]]:
    """Return steps and counts, averaged over neighbours where there are more updates than a figure can show."""
    size = -(-len(updates) // MAX_POINTS)
    bins = [updates[start : start + size] for start in range(0, len(updates), size)]
    steps = [sum(update.step for update in part) / len(part) for part in bins]
    return steps, [sum(getattr(update, name) for update in part) / len(part) for part in bins]


def layers(runs: Sequence[RecordedRun], style: dict[str, Style], note: str = "") -> Picture:
    """Draw the sparsity of every layer of one model: a row per layer in network order, a dot per run."""
    names = list(dict.fromkeys(name for run in runs for name in run.layers))
    row = {name: index for index, name in enumerate(names)}

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        lowest = 100.0
        for index, run in enumerate(runs):
            # A small offset within the row keeps runs that prune a layer alike from hiding each other.
            shift = 0.5 * (index - (len(runs) - 1) / 2) / max(len(runs) - 1, 1)
            x = [100 * layer.sparsity for layer in run.layers.values()]
            lowest = min(lowest, *x)
            _dots(axes, x, [row[name] + shift for name in run.layers], style[run.label])
        axes.set_xlim(max(10 * (lowest // 10), 0), 100)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("pruned weights, %")

    height = 0.8 + len(names) * (0.19 if len(names) <= 40 else 0.155)
    caption = "Layers from input (top) to output; a ring at 100 % is a layer that lost every weight."
    return picture(
        f"Sparsity by layer: {runs[0].model}", caption + note, draw, height, [style[run.label] for run in runs]
    )


def _dots(axes: Axes, x: Sequence[float], y: Sequence[float], style: Style) -> None:
    marker = style.marker or "o"
    axes.plot(x, y, marker, markersize=4.2, color=style.colour, markeredgewidth=0, alpha=0.9, clip_on=False)
    lost = [(a, b) for a, b in zip(x, y, strict=True) if a >= 100]
    for a, b in lost:
        axes.plot(a, b, "o", markersize=8, markerfacecolor="none", color=style.colour, clip_on=False)


def _epochs(run: RecordedRun) -> list[float]:
    return [epoch.epoch for epoch in run.epochs]


def _by_epoch(axes: Axes, runs: Sequence[RecordedRun], label: str) -> None:
    axes.set_xlim(0, max(len(run.epochs) for run in runs) + 0.5)
    whole_ticks(axes, 10)
    axes.set_xlabel("epoch")
    axes.set_ylabel(label)
