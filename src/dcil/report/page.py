"""Pages made of blocks, rendered as Markdown and as one self-contained HTML file.

The HTML has no script and loads nothing; all text is escaped by the template; it follows the reader's light or dark
colour scheme.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

from dcil.errors import missing_extra

if TYPE_CHECKING:
    from markupsafe import Markup

    from dcil.report.theme import Style

INK_ON_WHITE = "#1d232b"


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """Running text, with Markdown's `code` and **bold**."""

    text: str


@dataclass(frozen=True)
class TableRow:
    """``kind`` is how HTML shows the row: "", "mean", "outside" or "missing"; ``style`` puts the line style of a
    figure before the first cell, ``status`` a remark under it."""

    texts: tuple[str, ...]
    kind: str = ""
    style: Style | None = None
    status: str = ""


@dataclass(frozen=True)
class Table:
    """``first_number`` is the column from which on HTML aligns to the right."""

    headings: tuple[str, ...]
    rows: tuple[TableRow, ...]
    first_number: int | None = None


@dataclass(frozen=True)
class Picture:
    """An SVG with its caption; ``key`` names its lines where the drawing has no legend of its own.

    ``file`` is the name of the SVG file beside a Markdown page, which cannot hold it. ``narrow`` is the same drawn for
    a phone.
    """

    title: str
    caption: str
    svg: str
    key: tuple[Style, ...] = ()
    file: str = ""
    narrow: str = ""

    @property
    def file_text(self) -> str:
        """The SVG as a file of its own: dark on white, since it cannot know the page that shows it."""
        start = self.svg.index(">") + 1
        background = '\n <rect width="100%" height="100%" fill="#ffffff"/>'
        return (self.svg[:start] + background + self.svg[start:]).replace("currentColor", INK_ON_WHITE) + "\n"


@dataclass(frozen=True)
class Details:
    """A part that opens on a click, in HTML only. Its sections are lists, key-value pairs or preformatted text."""

    summary: str
    sections: Mapping[str, str | Sequence[str] | Mapping[str, str]]
    badge: str = ""
    style: Style | None = None


@dataclass(frozen=True)
class Folded:
    """A part that opens on a click, in HTML and in Markdown: paragraphs and tables under a line of plain text."""

    summary: str
    blocks: tuple[Paragraph | Table, ...]


MarkdownBlock = Heading | Paragraph | Table | Picture | Folded
Block = MarkdownBlock | Details


def markdown(blocks: Iterable[MarkdownBlock]) -> str:
    """Render the blocks as a Markdown page."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: MarkdownBlock) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {block.text}"
    if isinstance(block, Paragraph):
        return block.text
    if isinstance(block, Picture):
        return f"![{block.title}]({block.file})\n\n*{block.caption}*"
    if isinstance(block, Folded):
        inside = "\n\n".join(_markdown(part) for part in block.blocks)
        return f"<details>\n<summary>{escape(block.summary)}</summary>\n\n{inside}\n\n</details>"
    lines = [[_plain(text) for text in line] for line in (block.headings, *(row.texts for row in block.rows))]
    lines.insert(1, ["---"] * len(block.headings))
    return "\n".join(f"| {' | '.join(text or ' ' for text in line)} |" for line in lines)


def _plain(text: str) -> str:
    """Escape what Markdown would take as markup in the text of a table's cell."""
    text = escape(" ".join(text.split()), quote=False)
    return re.sub(r"[\\`*\[\]|~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", text)


def html(title: str, blocks: Sequence[Block], refresh: int | None = None) -> str:
    """Render the blocks as an HTML page, which a browser loads anew every ``refresh`` seconds."""
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError:
        raise missing_extra("jinja2", "report") from None
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    filters: dict[str, Any] = {
        "kind": lambda block: type(block).__name__,
        "inline": _inline,
        "svg": Markup,
        "anchor": _anchor,
    }
    environment.filters |= filters | {"anchor": _anchor}
    environment.tests["heading"] = lambda block: isinstance(block, Heading) and block.level == 2
    source = resources.files("dcil.report").joinpath("template.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(title=title, blocks=blocks, refresh=refresh)


def _anchor(text: str) -> str:
    """Return the id of a heading."""
    return re.sub(r"\W+", "-", text.lower()).strip("-")


def _inline(text: str) -> Markup:
    """Escape text, then mark up its `code` and **bold**."""
    from markupsafe import Markup

    coded = re.sub("`(.*?)`", r"<code>\1</code>", escape(text))
    return Markup(re.sub(r"\*\*(.*?)\*\*", r"<b>\1</b>", coded))
