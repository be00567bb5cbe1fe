"""Runs as pictures: inline SVG in which text and axes take the colour of the page around them.

The key of a picture is data, not drawing: the page sets it in HTML, where it wraps, never clips and is escaped.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from dcil.runs.read import MaskUpdate, RecordedRun

INK = "#010203"  # drawn in this, then replaced by `currentColor`: one picture serves light and dark pages
# Okabe and Ito's colours, less the yellow that vanishes on white; their black is the ink.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", INK)
MARKERS = ("", "s", "^", "D", "v")  # no "o": that is the dot of a run without a marker
MOST_POINTS = 200
STRIPE = 4.0  # length of a stripe, in line widths
WAITING = " Unfinished runs are left out: their layers are counted at the end."
WIDTH = 9.2
RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.13,
    "grid.linewidth": 0.6,
}


@dataclass(frozen=True)
class Style:
    """How one run looks in every picture; the marker tells runs apart once the colours are used up."""

    label: str
    colour: str
    marker: str

    @property
    def css(self) -> str:
        return "currentColor" if self.colour == INK else self.colour


@dataclass(frozen=True)
class Picture:
    """A drawing with what a reader needs beside it."""

    title: str
    caption: str
    svg: str
    key: tuple[Style, ...]


def styles(runs: Sequence[RecordedRun]) -> dict[str, Style]:
    """label -> style, by the order of the runs."""
    return {
        run.label: Style(run.label, COLOURS[i % len(COLOURS)], MARKERS[i // len(COLOURS) % len(MARKERS)])
        for i, run in enumerate(runs)
    }


def pictures(runs: Sequence[RecordedRun]) -> list[Picture]:
    """Every picture that has something to show."""
    style = styles(runs)
    started = [run for run in runs if run.epochs]
    pruned = [run for run in started if not run.dense]
    counted = [run for run in pruned if run.layers]
    drawn: list[Picture] = []
    if started:
        drawn.append(accuracy(started, style))
    if pruned:
        drawn.append(sparsity(pruned, style))
    waiting = WAITING if len(counted) < len(pruned) else ""
    moved = [run for run in counted if any(update.revived or update.dropped for update in run.updates)]
    if moved:
        drawn.append(flips(moved, style, waiting))
    models = dict.fromkeys(run.model for run in counted)
    drawn += [layers([run for run in counted if run.model == model], style, waiting) for model in models]
    return drawn


def accuracy(runs: Sequence[RecordedRun], style: dict[str, Style]) -> Picture:
    """Test accuracy by epoch: pruned path solid, super path dotted."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for run in runs:
            curve = [epoch.top1 for epoch in run.epochs]
            _line(axes, _epochs(run), curve, style[run.label], 1.7 if len(runs) <= 6 else 1.2)
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
    return _picture("Test accuracy by epoch", f"{caption}{dotted}", draw, 4.4, runs, style)


def _limits(runs: Sequence[RecordedRun]) -> tuple[float, float]:
    """From the lowest point after the first tenth of the epochs (all start near chance) to the highest of all."""
    seen, settled = [], []
    for run in runs:
        curve = [(epoch.top1, epoch.top1 if epoch.top1_super is None else epoch.top1_super) for epoch in run.epochs]
        seen += [value for pair in curve for value in pair]
        settled += [value for pair in curve[len(curve) // 10 :] for value in pair]
    low, high = min(settled), max(seen)
    room = max(0.06 * (high - low), 0.5)
    return max(low - room, -1.0), min(high + room, 101.0)


def sparsity(runs: Sequence[RecordedRun], style: dict[str, Style]) -> Picture:
    """Sparsity by epoch; runs that coincide share one line, striped in their colours."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for together in _coinciding(runs):
            for index, run in enumerate(together):
                curve = [100 * epoch.sparsity for epoch in run.epochs]
                line = _line(axes, _epochs(run), curve, style[run.label], 2.2)
                if index:  # the first stays solid and shows between the stripes of the others
                    line.set_linestyle((-STRIPE * index, (STRIPE, STRIPE * (len(together) - 1))))
        axes.set_ylim(bottom=0)
        _by_epoch(axes, runs, "pruned weights, %")

    caption = "How fast each run was pruned; runs with the same schedule share one line, striped in their colours."
    return _picture("Sparsity by epoch", caption, draw, 2.8, runs, style)


def _coinciding(runs: Sequence[RecordedRun]) -> list[list[RecordedRun]]:
    """The runs in groups whose curves cannot be told apart as far as both go."""
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


def flips(runs: Sequence[RecordedRun], style: dict[str, Style], remark: str = "") -> Picture:
    """Weights revived and dropped per mask update, as shares of the prunable weights."""

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        drawn: list[float] = []
        for axes, name in zip(panels, ("revived", "dropped"), strict=True):
            for run in runs:
                total = sum(layer.weights for layer in run.layers.values())
                steps, counts = _binned(run.updates, name)
                shares = [100 * count / total if count > 0 else math.nan for count in counts]
                drawn += [share for share in shares if share > 0]
                _line(axes, steps, shares, style[run.label], 1.3)
            axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
            axes.set_xlabel("training step")
            axes.set_title(name, loc="left", fontsize=10)
        panels[0].set_ylabel("weights per update, %")
        _decades(panels[0], drawn)

    caption = (
        "Share of the prunable weights that each mask update brings back (left) and takes away (right), log scale: "
        "look for lines that fall as the mask settles."
    )
    return _picture("Mask flips per update", caption + remark, draw, 3.1, runs, style)


def _decades(axes: Axes, values: Sequence[float]) -> None:
    """A log scale between whole powers of ten: a narrower one could be left without a labelled tick."""
    axes.set_yscale("log")
    axes.set_ylim(10.0 ** math.floor(math.log10(min(values))), 10.0 ** (math.floor(math.log10(max(values))) + 1))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _binned(updates: Sequence[MaskUpdate], name: str) -> tuple[list[float], list[float]]:
    """Steps and counts, averaged over neighbours where there are more updates than a picture can show."""
    size = -(-len(updates) // MOST_POINTS)
    bins = [updates[start : start + size] for start in range(0, len(updates), size)]
    steps = [sum(update.step for update in part) / len(part) for part in bins]
    return steps, [sum(getattr(update, name) for update in part) / len(part) for part in bins]


def layers(runs: Sequence[RecordedRun], style: dict[str, Style], remark: str = "") -> Picture:
    """Sparsity of every layer of one model: a row per layer in network order, a dot per run."""
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
    return _picture(f"Sparsity by layer: {runs[0].model}", caption + remark, draw, height, runs, style)


def _dots(axes: Axes, x: Sequence[float], y: Sequence[float], style: Style) -> None:
    marker = style.marker or "o"
    axes.plot(x, y, marker, markersize=4.2, color=style.colour, markeredgewidth=0, alpha=0.9, clip_on=False)
    lost = [(a, b) for a, b in zip(x, y, strict=True) if a >= 100]
    for a, b in lost:
        axes.plot(a, b, "o", markersize=8, markerfacecolor="none", color=style.colour, clip_on=False)


def _epochs(run: RecordedRun) -> list[float]:
    return [epoch.epoch for epoch in run.epochs]


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], style: Style, width: float) -> Line2D:
    marker = style.marker or ("o" if len(x) == 1 else "")  # a line of one point would be invisible
    every = max(len(x) // 10, 1)
    (line,) = axes.plot(x, y, color=style.colour, linewidth=width, marker=marker, markersize=4, markevery=every)
    return line


def _by_epoch(axes: Axes, runs: Sequence[RecordedRun], label: str) -> None:
    axes.set_xlim(0, max(len(run.epochs) for run in runs) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10], integer=True))
    axes.set_xlabel("epoch")
    axes.set_ylabel(label)


def _picture(
    title: str,
    caption: str,
    draw: Callable[[Figure], None],
    height: float,
    runs: Sequence[RecordedRun],
    style: dict[str, Style],
) -> Picture:
    """Run `draw` on an empty figure under the house style, and keep what it drew."""
    # The salt makes the ids repeatable, and being the title, unlike those of the other pictures on the page.
    with matplotlib.rc_context({**RC, "svg.hashsalt": title}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return Picture(title, caption, _inline(buffer.getvalue()), tuple(style[run.label] for run in runs))


def _inline(svg: str) -> str:
    """Only the <svg> element, sized by the page, without the ids and the style sheet that would leak into it."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' width="[\d.]+pt"| height="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r"<style.*?</style>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    return svg.replace(INK, "currentColor").strip()
