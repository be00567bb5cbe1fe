"""Pictures of the report: repeatable SVG, for a page (taking its colour) or as a file of its own."""

from __future__ import annotations

import io
import itertools
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dcil.reproduce.iterations import CELLS
from dcil.reproduce.page import Picture
from dcil.reproduce.records import Record

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777")
DASHES = ("-", "--", ":")
RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.2,
    "legend.frameon": False,
}


def styles() -> Iterator[dict[str, Any]]:
    """As many kinds of lines as one asks for, of which so many differ."""
    for dash, colour in itertools.cycle(itertools.product(DASHES, COLOURS)):
        yield {"color": colour, "linestyle": dash, "linewidth": 1.2}


def iterations(epoch: int, looks: Sequence[Mapping[str, Any]]) -> Picture:
    """Top-1 after every iteration of one epoch; thin lines where masks changed."""
    names = dict.fromkeys([*(cell.id for cell in CELLS), *(look["cell"] for look in looks)])

    def draw(axes: Axes) -> None:
        for style, name in zip(styles(), names, strict=False):  # a cell looks the same whichever others are there
            for look in looks:
                if look["cell"] == name:
                    label = f"{name.split('/')[-1]}, seed {look['seed']}"
                    axes.plot(range(1, len(look["top1"]) + 1), look["top1"], label=label, **style)
        for step, *_ in looks[0]["updates"]:
            axes.axvline(step, color="#999999", linewidth=0.4, alpha=0.6)
        axes.set_xlabel("iteration of the epoch")
        axes.set_ylabel("test top-1, %")

    caption = f"Test accuracy after every iteration of epoch {epoch}; thin vertical lines are mask changes."
    if epoch == 120:
        caption += " The paper's figure: DPF falls by 10 to 20 points after a change, DCIL by 2 to 5."
    return drawn(f"Accuracy after every iteration of epoch {epoch}", caption, draw, f"iterations-epoch{epoch}")


def flips(title: str, file: str, cells: Mapping[str, Sequence[Record]]) -> Picture:
    """Weights revived per mask update by epoch, the mean over seeds."""

    def draw(axes: Axes) -> None:
        for style, (name, records) in zip(styles(), cells.items(), strict=False):
            columns = [record.column("revived") for record in records]
            shares = [100 / record.raw["summary"]["weights"] for record in records]
            curve = [
                statistics.fmean(v * s for v, s in zip(epoch, shares, strict=True)) if None not in epoch else None
                for epoch in zip(*columns, strict=True)
            ]
            points = [(e, v) for e, v in enumerate(curve, start=1) if v]
            if points:
                axes.plot(*zip(*points, strict=True), label=name, **style)
        axes.set_yscale("log")
        axes.set_xlabel("epoch")
        axes.set_ylabel("weights revived per update, %")

    caption = f"{title}: share of the prunable weights that a mask update brings back, mean over an epoch and seeds."
    return drawn(f"Weights revived per update, {title}", caption, draw, file)


def drawn(title: str, caption: str, draw: Callable[[Axes], None], file: str) -> Picture:
    with matplotlib.rc_context({**RC, "svg.hashsalt": title}):
        figure = Figure(figsize=(9.2, 3.4), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(ncols=3, fontsize=8.5)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    # Ids repeat from picture to picture; within one page they may not, so they carry the name of the file.
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{file}-", svg[svg.index("<svg") :]).strip()
    return Picture(title, caption, svg, f"results-{file}.svg")
