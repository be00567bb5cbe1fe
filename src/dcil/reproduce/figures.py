"""Figures of the results page: accuracy by iteration, and weights revived by epoch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dcil.report.page import Picture
from dcil.report.theme import INK, log_scale, picture, plot_line, styles
from dcil.reproduce.iterations import CELLS
from dcil.reproduce.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINE_WIDTH = 1.2


def iterations(epoch: int, traces: Sequence[Mapping[str, Any]]) -> Picture:
    """Draw top-1 after every iteration of one epoch, with thin lines where masks changed."""
    # A cell keeps its style whichever others were recorded.
    style = styles(list(dict.fromkeys([*(cell.id for cell in CELLS), *(trace["cell"] for trace in traces)])))

    def draw(axes: Axes) -> None:
        for trace in sorted(traces, key=lambda trace: list(style).index(trace["cell"])):
            steps = range(1, len(trace["top1"]) + 1)
            label = f"{trace['cell'].split('/')[-1]}, seed {trace['seed']}"
            plot_line(axes, steps, trace["top1"], style[trace["cell"]], LINE_WIDTH, label)
        for step, *_ in traces[0]["updates"]:
            axes.axvline(step, color=INK, linewidth=0.4, alpha=0.3)
        axes.set_xlabel("iteration of the epoch")
        axes.set_ylabel("test top-1, %")

    caption = f"Test accuracy after every iteration of epoch {epoch}; thin vertical lines are mask changes."
    if epoch == 120:
        caption += " The paper's figure: DPF falls by 10 to 20 points after a change, DCIL by 2 to 5."
    return with_legend(f"Accuracy after every iteration of epoch {epoch}", caption, draw, f"iterations-epoch{epoch}")


def flips(title: str, file: str, cells: Mapping[str, Sequence[Record]]) -> Picture:
    """Draw the weights revived per mask update by epoch, the mean over seeds."""
    style = styles(list(cells))

    def draw(axes: Axes) -> None:
        drawn: list[float] = []
        for name, records in cells.items():
            columns = [record.column("revived") for record in records]
            shares = [100 / record.raw["summary"]["weights"] for record in records]
            curve = [
                statistics.fmean(v * s for v, s in zip(epoch, shares, strict=True)) if None not in epoch else None
                for epoch in zip(*columns, strict=True)
            ]
            epochs = [epoch for epoch, value in enumerate(curve, start=1) if value]
            values = [value for value in curve if value]
            if values:
                plot_line(axes, epochs, values, style[name], LINE_WIDTH, name)
                drawn += values
        if drawn:
            log_scale(axes, drawn)
        axes.set_xlabel("epoch")
        axes.set_ylabel("weights revived per update, %")

    caption = f"{title}: share of the prunable weights that a mask update brings back, mean over an epoch and seeds."
    return with_legend(f"Weights revived per update, {title}", caption, draw, file)


def with_legend(title: str, caption: str, draw: Callable[[Axes], None], file: str) -> Picture:
    """Draw one panel with its legend inside: the Markdown page shows the picture as a file of its own."""

    def panel(figure: Figure) -> None:
        axes = figure.subplots()
        draw(axes)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(ncols=3)

    return picture(title, caption, panel, 3.4, file=f"results-{file}.svg")
