"""The look of all figures: colours, line styles, and SVG with repeatable bytes.

Text and axes of a figure take the colour of the page around it.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dcil.errors import missing_extra
from dcil.report.page import Picture

try:
    import matplotlib
except ImportError:
    raise missing_extra("matplotlib", "report") from None
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

INK = "#010203"  # drawn in this, then replaced by `currentColor`: one drawing serves light and dark pages
# Okabe and Ito's colours, less the yellow that vanishes on white; their black is the ink.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", INK)
# Matplotlib's marker -> the same in text. No "o": that is the dot of a line with one point.
MARKERS = {"": "", "s": "■", "^": "▲", "D": "◆", "v": "▼"}
WIDTH, NARROW = 9.2, 4.6  # inches: for a page, and for a phone
BAND = 0.16  # opacity of a band around a line
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
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


@dataclass(frozen=True)
class Style:
    """How one run or cell looks in every figure; markers tell lines apart once the colours are used up."""

    label: str
    colour: str
    marker: str

    @property
    def css(self) -> str:
        return "currentColor" if self.colour == INK else self.colour

    @property
    def glyph(self) -> str:
        return MARKERS[self.marker]


def styles(labels: Sequence[str]) -> dict[str, Style]:
    """Map each label to a style, by their order."""
    markers = list(MARKERS)
    return {
        label: Style(label, COLOURS[i % len(COLOURS)], markers[i // len(COLOURS) % len(markers)])
        for i, label in enumerate(labels)
    }


def plot_line(
    axes: Axes, x: Sequence[float], y: Sequence[float], style: Style, width: float, label: str | None = None
) -> Line2D:
    """Plot a line in its style, with at most about ten markers."""
    marker = style.marker or ("o" if len(x) == 1 else "")  # a line of one point would be invisible
    every = max(len(x) // 10, 1)
    (line,) = axes.plot(
        x, y, color=style.colour, linewidth=width, marker=marker, markersize=4, markevery=every, label=label
    )
    return line


def whole_ticks(axes: Axes, most: int) -> None:
    """Put at most about ``most`` ticks on the x axis, at whole numbers."""
    axes.xaxis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10], integer=True))


def log_scale(axes: Axes, values: Sequence[float]) -> None:
    """Set a log scale between whole powers of ten: a narrower one could be left without a labelled tick."""
    axes.set_yscale("log")
    axes.set_ylim(10.0 ** math.floor(math.log10(min(values))), 10.0 ** (math.floor(math.log10(max(values))) + 1))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def log_ticks(axes: Axes) -> None:
    """Set a log scale on the x axis, labelled at 1, 2, 5, 10, …"""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def is_narrow(figure: Figure) -> bool:
    """Whether a figure is drawn for a phone: panels then stand below each other."""
    return figure.get_figwidth() < WIDTH


def picture(
    title: str,
    caption: str,
    draw: Callable[[Figure], None],
    height: float,
    key: Sequence[Style] = (),
    file: str = "",
    narrow_height: float | None = None,
) -> Picture:
    """Run ``draw`` on an empty figure under the theme, wide and narrow, and return both as a block."""
    wide = _svg(draw, title, WIDTH, height)
    narrow = _svg(draw, f"{title}, narrow", NARROW, narrow_height or min(height, 0.9 * NARROW))
    return Picture(title, caption, wide, tuple(key), file, narrow)


def _svg(draw: Callable[[Figure], None], salt: str, width: float, height: float) -> str:
    # The salt makes the ids repeatable, and being the title, unlike those of the other pictures on the page.
    with matplotlib.rc_context({**RC, "svg.hashsalt": salt}):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        no_metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    return _inline(buffer.getvalue())


def _inline(svg: str) -> str:
    """Return the <svg> element without the ids and the style sheet that would leak into the page."""
    svg = svg[svg.index("<svg") :].replace("<svg", '<svg stroke-linejoin="round"', 1)
    svg = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    return svg.replace(INK, "currentColor").strip()
