"""Figures at the top of the results page: agreement with the paper, accuracy by sparsity, accuracy by epoch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dcil.report.page import Picture
from dcil.report.theme import INK, Style, is_narrow, picture, plot_line, styles
from dcil.reproduce.cells import Cell
from dcil.reproduce.comparison import Measurements

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dcil.reproduce.overview import Comparison

METHODS = ("dense", "dpf", "dcil")
STYLES: Mapping[str, Style] = {**styles(METHODS), "dense": Style("dense", INK, "")}
TICKS = (-10, -3, -1, -0.5, 0, 0.5, 1, 3, 10)
Network = tuple[str, str]
Panel = Callable[["Axes", Sequence[Cell]], None]


def pictures(compared: Sequence[Comparison], ours: Measurements, cells: Sequence[Cell]) -> list[Picture]:
    """Draw what there are records for."""
    shown = [cell for cell in cells if is_main(cell)]
    networks = {
        network: members
        for network in dict.fromkeys((cell.dataset, cell.model) for cell in shown)
        if (members := [cell for cell in shown if (cell.dataset, cell.model) == network])
        and any(cell.method == "dcil" for cell in members)
        and any(cell.method == "dpf" for cell in members)
    }
    last = [one for one in compared if one.column == "last"]
    drawn = [agreement(last)] if last else []
    if networks:
        drawn += [by_sparsity(networks, ours), by_epoch(networks, ours)]
    return drawn


def is_main(cell: Cell) -> bool:
    """Whether a cell is one of the main comparison: dense, DPF and DCIL by weights, the main recipe."""
    plain = cell.kl and cell.warmup is None and cell.target is None and not cell.finetune
    plain = plain and cell.private is None and cell.share is None
    return plain and cell.method in METHODS and cell.granularity == "weight" and not cell.is_transformer


def agreement(compared: Sequence[Comparison]) -> Picture:
    """Draw ours minus the paper's for every cell, with the paper's deviation as a bar and ours as a line."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for row, one in enumerate(compared):
            style = STYLES.get(one.cell.method, STYLES["dense"])
            axes.barh(row, 4 * one.std, left=-2 * one.std, height=0.62, color=INK, alpha=0.13, linewidth=0)
            if len(one.ours) > 1:
                half = statistics.stdev(one.ours)
                axes.hlines(row, one.difference - half, one.difference + half, color=style.colour, linewidth=1.4)
            axes.plot([one.difference], [row], "o", color=style.colour, markersize=5)
        axes.axvline(0, color=INK, linewidth=0.7, alpha=0.6)
        names = [f"{one.cell.dataset.removeprefix('cifar')} {one.cell.model} {one.cell.name}" for one in compared]
        axes.set_yticks(range(len(compared)), names, fontsize=8)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xscale("symlog", linthresh=1)  # most differ by tenths, DPF by points
        axes.set_xticks(TICKS, [f"{tick:+g}".replace("-", "\N{MINUS SIGN}") if tick else "0" for tick in TICKS])
        axes.set_xlabel("ours minus the paper's mean, points of test top-1")

    caption = (
        "The last epoch of every cell that the paper's authors ran themselves, beside their mean. Grey: two of their "
        "standard deviations to either side. Lines: one of ours, where there are several seeds. "
        "CIFAR-10 and CIFAR-100 stand as 10 and 100; beyond one point the axis is logarithmic."
    )
    height = 0.9 + 0.24 * len(compared)
    key = [STYLES[method] for method in METHODS]
    return picture("Ours beside the paper's", caption, draw, height, key, "results-agreement.svg", height)


def by_sparsity(networks: Mapping[Network, Sequence[Cell]], ours: Measurements) -> Picture:
    """Draw the last accuracy over sparsity, a panel per network; the paper's numbers are in the tables."""

    def draw_one(axes: Axes, cells: Sequence[Cell]) -> None:
        levels = sorted({cell.sparsity for cell in cells if cell.method in METHODS[1:]})
        axes.set_xticks(range(len(levels)), [f"{100 * level:g} %" for level in levels])
        for method in METHODS[1:]:
            members = sorted((cell for cell in cells if cell.method == method), key=lambda cell: cell.sparsity)
            for column, line in (("last", "-"), ("best", ":")):
                means = [statistics.fmean(ours.values(cell, "top-1", column)) for cell in members]
                x, look = [levels.index(cell.sparsity) for cell in members], STYLES[method]
                axes.plot(x, means, line, color=look.colour, marker="o", markersize=4, linewidth=1.5)
        for cell in cells:
            if cell.method == "dense":
                level = statistics.fmean(ours.values(cell, "top-1", "last"))
                axes.axhline(level, color=INK, linewidth=0.9, alpha=0.6, linestyle=(0, (4, 3)))
        axes.set_xlabel("sparsity")
        axes.margins(x=0.2)

    caption = "Test top-1 of what is pruned to, by sparsity. Solid: last epoch; dotted: best epoch; dashed: dense."
    return panels("Accuracy by sparsity", caption, networks, draw_one, "results-sparsity.svg")


def by_epoch(networks: Mapping[Network, Sequence[Cell]], ours: Measurements) -> Picture:
    """Draw accuracy by epoch at the highest sparsity that both DPF and DCIL have, one seed each."""

    def draw_one(axes: Axes, cells: Sequence[Cell]) -> None:
        sparsities = [{cell.sparsity for cell in cells if cell.method == method} for method in METHODS[1:]]
        level = max(sparsities[0] & sparsities[1], default=0.0)
        lowest = 100.0
        for cell in sorted(cells, key=lambda cell: METHODS.index(cell.method)):
            if cell.sparsity not in (0.0, level):
                continue
            top1 = ours.records_of(cell)[0].column("top1")
            points = [(epoch, value) for epoch, value in enumerate(top1, start=1) if value is not None]
            plot_line(axes, [epoch for epoch, _ in points], [value for _, value in points], STYLES[cell.method], 1.1)
            half = [value for epoch, value in points if epoch > len(top1) / 2]
            lowest = min([lowest, *half])
        axes.set_ylim(bottom=lowest - 1)
        axes.set_xlabel("epoch")
        axes.text(0.98, 0.03, f"{100 * level:g} %", ha="right", va="bottom", transform=axes.transAxes)

    caption = (
        "Test top-1 by epoch at the highest sparsity that both methods were run at (written in the corner), the first "
        "seed of each. The axis begins at the lowest point of the second half."
    )
    return panels("Stability by epoch", caption, networks, draw_one, "results-stability.svg")


def panels(title: str, caption: str, networks: Mapping[Network, Sequence[Cell]], draw_one: Panel, file: str) -> Picture:
    """Draw a panel for each network, two or three beside each other."""

    def draw(figure: Figure) -> None:
        columns = 1 if is_narrow(figure) else min(3, len(networks))
        rows = -(-len(networks) // columns)
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, (network, cells) in zip(grid, networks.items(), strict=False):
            draw_one(axes, cells)
            axes.set_title(f"{network[1]}, {network[0]}", fontsize=9.5)
            axes.set_ylabel("test top-1, %")
        for axes in grid[len(networks) :]:
            axes.set_visible(False)

    rows = -(-len(networks) // 3)
    key = [STYLES[method] for method in METHODS]
    return picture(title, caption, draw, 2.7 * rows, key, file, 2.4 * len(networks))
