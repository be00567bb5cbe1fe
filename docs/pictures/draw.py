"""Draw the pictures of the pages: `python docs/pictures/draw.py` writes the SVG files beside this one.

Colours are variables: the site sets them by its theme (_static/site.css), a viewer of the file by its own.
"""

from __future__ import annotations

import math
from pathlib import Path

from dcil import Cubic

HERE = Path(__file__).parent
STYLE = """<style>
svg { color: #1f2328; font-family: system-ui, sans-serif;
  --kept: #2563b0; --pruned: #c9ced6; --super: #b4540a; --quiet: #6b7280; --panel: #00000008; --on: #fff; }
@media (prefers-color-scheme: dark) { svg { color: #e6edf3;
  --kept: #6ea8ec; --pruned: #4a515c; --super: #f0a35c; --quiet: #9aa3af; --panel: #ffffff0d; --on: #0b1420; } }
</style>"""
KEPT, PRUNED, SUPER, QUIET = "var(--kept)", "var(--pruned)", "var(--super)", "var(--quiet)"


def text(x: float, y: float, words: str, size: int = 13, fill: str = "currentColor", anchor: str = "middle") -> str:
    bold = ' font-weight="600"' if size > 14 else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{bold}>{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str = "var(--panel)", line: str = QUIET) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{fill}" stroke="{line}" '
        'stroke-width="1"/>'
    )


def arrow(x: float, y: float, to_x: float, to_y: float, colour: str = QUIET) -> str:
    turn = math.atan2(to_y - y, to_x - x)
    tips = [(to_x - 8 * math.cos(turn + s), to_y - 8 * math.sin(turn + s)) for s in (0.45, -0.45)]
    head = " ".join(f"{a:.1f},{b:.1f}" for a, b in [(to_x, to_y), *tips])
    return (
        f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{colour}" stroke-width="2"/>'
        f'<polygon points="{head}" fill="{colour}"/>'
    )


def grid(x: float, y: float, values: list[float | None], colours: list[str], side: float = 26, across: int = 3) -> str:
    """Cells with a number each; None is an empty cell."""
    parts = []
    for place, (value, colour) in enumerate(zip(values, colours, strict=True)):
        left, top = x + place % across * side, y + place // across * side
        parts.append(
            f'<rect x="{left:g}" y="{top:g}" width="{side - 2:g}" height="{side - 2:g}" rx="3" fill="{colour}"/>'
        )
        if value is not None:
            light = "var(--on)" if colour in (KEPT, SUPER) else "currentColor"
            ink = f'fill="{light}"'
            label = f"{value:g}".replace("-", "−").replace("0.", ".")
            parts.append(
                f'<text x="{left + side / 2 - 1:g}" y="{top + side / 2 + 3:g}" font-size="{side * 0.4:g}" {ink} '
                f'text-anchor="middle">{label}</text>'
            )
    return "".join(parts)


def save(name: str, width: int, height: int, *parts: str) -> None:
    body = "\n".join((STYLE, *parts))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'
    (HERE / f"{name}.svg").write_text(f"{head}\n{body}\n</svg>\n")


def two_paths() -> None:
    """Nine weights over three steps: one is pruned, learns on the super path, and comes back."""
    before, after = [0.9, 0.1, -0.7, -0.2, 0.8, 0.3, 0.1, -0.6, 0.5], [0.9, 0.1, -0.7, -0.2, 0.8, 0.6, 0.1, -0.6, 0.3]
    steps = [
        ("1  One set of weights, one mask", before, {0, 2, 4, 7, 8}, "loss",
         ["Blue computes with kept weights,", "orange computes with all of them.", "Grey is read, not trained."]),
        ("2  Each path trains its own", after, {0, 2, 4, 7, 8}, "gradient",
         ["The pruned weight .3 grew to .6", "on the super path; the kept", "weight .5 shrank to .3."]),
        ("3  The mask is drawn anew", after, {0, 2, 4, 7, 5}, "",
         ["The five largest of nine stay:", ".6 comes back, already trained,", "and .3 is pruned."]),
    ]  # fmt: skip
    for place, (title, weights, kept, flow, words) in enumerate(steps, 1):
        parts = [box(2, 2, 256, 290), text(16, 30, title, 15, anchor="start")]
        parts += [text(68, 58, "pruned path", 13, KEPT), text(192, 58, "super path", 13, SUPER)]
        pruned = [w if i in kept else 0 for i, w in enumerate(weights)]
        parts.append(grid(22, 68, pruned, [KEPT if i in kept else PRUNED for i in range(9)], 31))
        parts.append(grid(146, 68, list(weights), [PRUNED if i in kept else SUPER for i in range(9)], 31))
        ends = (168, 192) if flow == "loss" else (192, 168)
        if flow:
            parts += [arrow(68, ends[0], 68, ends[1], KEPT), arrow(192, ends[0], 192, ends[1], SUPER)]
            parts += [text(68, 209, flow, 13), text(192, 209, flow, 13)]
        parts += [text(130, 238 + 19 * row, line, 13, QUIET) for row, line in enumerate(words)]
        save(f"step-{place}", 260, 294, *parts)


def views() -> None:
    """What a layer computes with, and which weights its gradient reaches."""
    weights = [0.9, 0.1, -0.7, -0.2, 0.8, 0.3]
    kept = {0, 2, 4}
    columns = [
        ("kept", "w · m", [w if i in kept else 0 for i, w in enumerate(weights)], kept),
        ("revived", "where(m, sg(w), w)", weights, set(range(6)) - kept),
        (
            "straight_through",
            "w + sg(w · m − w)",
            [w if i in kept else 0 for i, w in enumerate(weights)],
            set(range(6)),
        ),
        ("whole", "w", weights, set(range(6))),
    ]
    parts = []
    for place, (name, formula, values, trained) in enumerate(columns):
        x = 10 + place * 196
        parts += [box(x, 8, 184, 176), text(x + 92, 32, name, 15), text(x + 92, 52, formula, 12, QUIET)]
        parts.append(grid(x + 47, 64, list(values), [KEPT if i in trained else PRUNED for i in range(6)], 32))
        reach = {3: "kept weights" if trained == kept else "pruned weights", 6: "all weights"}[len(trained)]
        parts += [text(x + 92, 152, "gradient reaches", 12, QUIET), text(x + 92, 170, reach, 12)]
    save("views", 794, 192, *parts)


def schedule() -> None:
    """The cubic curve, as the library computes it: 95 % after three quarters of 300 epochs."""
    steps, left, top, width, height = 300, 70, 20, 640, 200
    curve = Cubic(final=0.95, steps=225)
    points = " ".join(
        f"{left + width * t / steps:.1f},{top + height * (1 - curve(t)):.1f}" for t in range(0, steps + 1, 3)
    )
    parts = [f'<polyline points="{points}" fill="none" stroke="{KEPT}" stroke-width="3"/>']
    for share in (0, 0.5, 0.95):
        y = top + height * (1 - share)
        parts.append(
            f'<line x1="{left}" y1="{y:g}" x2="{left + width}" y2="{y:g}" stroke="{PRUNED}" stroke-dasharray="3 4"/>'
        )
        parts.append(text(left - 8, y + 4, f"{100 * share:g} %", 12, QUIET, "end"))
    for t, label in ((0, "begin"), (75, "¼"), (150, "½"), (225, "ramp = ¾: target reached"), (300, "steps")):
        parts.append(text(left + width * t / steps, top + height + 20, label, 12, QUIET))
    parts.append(text(left + width * 0.5, top + 70, "fast at first, slow at the end", 13))
    parts += [f'<line x1="{left + width * i / 75:.1f}" y1="{top + height}" x2="{left + width * i / 75:.1f}" '
              f'y2="{top + height - 6}" stroke="{SUPER}"/>' for i in range(76)]  # fmt: skip
    parts.append(text(left + width - 4, top + height - 14, "every mark: a mask update", 12, SUPER, "end"))
    save("schedule", 740, 254, *parts)


def selection() -> None:
    """Scores of three layers in one ranking; the k largest are kept."""
    layers = [("conv1", [9, 6, 5, 2]), ("conv2", [8, 4, 3, 1, 1]), ("conv3", [7, 3, 2])]
    ranked = sorted(((s, n, i) for n, (_, scores) in enumerate(layers) for i, s in enumerate(scores)), reverse=True)
    kept = {(n, i) for _, n, i in ranked[:6]}
    parts, x = [], 40.0
    for number, (name, scores) in enumerate(layers):
        start = x
        for place, score in enumerate(scores):
            colour = KEPT if (number, place) in kept else PRUNED
            parts.append(
                f'<rect x="{x:g}" y="{170 - 14 * score}" width="34" height="{14 * score}" rx="3" fill="{colour}"/>'
            )
            x += 40
        parts.append(text((start + x - 6) / 2, 192, name, 13))
        x += 26
    parts.append(
        f'<line x1="30" y1="107" x2="{x - 30:g}" y2="107" stroke="{SUPER}" stroke-width="2" stroke-dasharray="6 4"/>'
    )
    parts.append(text(x - 24, 100, "k-th largest score", 12, SUPER, "start"))
    parts.append(text(x - 24, 122, "k = n − floor(s · n) = 6 of 12", 12, QUIET, "start"))
    save("selection", int(x) + 190, 206, *parts)


def engine() -> None:
    """The recorded step: two streams between batch and optimizer."""
    parts = [
        box(10, 8, 780, 150),
        text(24, 32, "recorded once as a CUDA graph, replayed every step", 13, QUIET, "start"),
    ]
    parts += [box(26, 66, 84, 40, "none"), text(68, 91, "batch")]
    parts += [box(150, 44, 250, 36, "none", KEPT), text(275, 67, "pruned path: forward, backward", 13, KEPT)]
    parts += [box(150, 96, 250, 36, "none", SUPER), text(275, 119, "super path: forward, backward", 13, SUPER)]
    parts += [arrow(110, 80, 148, 62), arrow(110, 92, 148, 114), arrow(400, 62, 438, 80), arrow(400, 114, 438, 92)]
    parts += [box(440, 66, 100, 40, "none"), text(490, 91, "optimizer"), arrow(540, 86, 574, 86)]
    parts += [box(576, 66, 196, 40, "none"), text(674, 84, "mask update,"), text(674, 99, "when it is due", 12, QUIET)]
    save("engine", 800, 166, *parts)


def runtime() -> None:
    """A filter of nine weights, of which the plan keeps three taps."""
    values: list[float | None] = [None, 0.4, None, None, -0.8, None, 0.3, None, None]
    parts = [text(88, 26, "a filter, 3 of 9 kept", 13)]
    parts.append(grid(40, 40, values, [KEPT if v is not None else PRUNED for v in values], 33))
    parts += [arrow(160, 88, 226, 88), text(320, 26, "taps: offset and value", 13)]
    for row, (offset, value) in enumerate((("(0, 1)", ".4"), ("(1, 1)", "−.8"), ("(2, 0)", ".3"))):
        parts += [box(240, 42 + 34 * row, 160, 28, "none", KEPT), text(284, 61 + 34 * row, offset, 13)]
        parts.append(text(360, 61 + 34 * row, value, 13))
    parts += [arrow(412, 88, 478, 88), text(610, 26, "a tile of outputs stays in registers", 13)]
    parts += [box(490, 42 + 34 * row, 240, 28, "none") for row in range(3)]
    for row, (name, value) in enumerate((("(0, 1)", ".4"), ("(1, 1)", "−.8"), ("(2, 0)", ".3"))):
        parts.append(text(610, 61 + 34 * row, f"sum += {value} · x shifted by {name}", 13))
    save("runtime", 760, 158, *parts)


def main() -> None:
    for draw in (two_paths, views, schedule, selection, engine, runtime):
        draw()


if __name__ == "__main__":
    main()
