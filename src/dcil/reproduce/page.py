"""A page of headings, sentences, tables and pictures, as Markdown and as HTML with the same contents."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 92rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: .2rem .5rem; border-bottom: 1px solid #ddd; text-align: left; white-space: nowrap; }
td:last-child { white-space: normal; min-width: 14rem; }
tr.outside { background: #fff3e0; } tr.missing td { color: #999; }
figure { margin: 1rem 0; } figure svg { width: 100%; height: auto; color: #222; } figcaption { font-size: 13px; }
@media (prefers-color-scheme: dark) {
  body { background: #181818; color: #ddd; } figure svg { color: #ddd; }
  th, td { border-color: #444; } tr.outside { background: #4a3413; } tr.missing td { color: #777; }
}
"""


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Cells:
    """A line of a table; ``kind`` is how HTML shows it: "", "outside" or "missing"."""

    texts: tuple[str, ...]
    kind: str = ""


@dataclass(frozen=True)
class Table:
    headings: tuple[str, ...]
    rows: tuple[Cells, ...]


@dataclass(frozen=True)
class Picture:
    """``file`` is its name beside the Markdown page, where pictures cannot stand inside."""

    title: str
    caption: str
    svg: str
    file: str


Block = Heading | Text | Table | Picture


def markdown(blocks: Iterable[Block]) -> str:
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {block.text}"
    if isinstance(block, Text):
        return block.text
    if isinstance(block, Picture):
        return f"![{block.title}]({block.file})\n\n*{block.caption}*"
    lines = [block.headings, ("---",) * len(block.headings), *(row.texts for row in block.rows)]
    return "\n".join(f"| {' | '.join(text.replace('|', chr(92) + '|') or ' ' for text in line)} |" for line in lines)


def page(title: str, blocks: Sequence[Block]) -> str:
    body = "\n".join(_html(block) for block in blocks)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{html.escape(block.text)}</h{block.level}>"
    if isinstance(block, Text):
        return "<p>" + re.sub("`(.*?)`", r"<code>\1</code>", html.escape(block.text)) + "</p>"
    if isinstance(block, Picture):
        return f"<figure>\n{block.svg}\n<figcaption>{html.escape(block.caption)}</figcaption>\n</figure>"
    head = "".join(f"<th>{html.escape(text)}</th>" for text in block.headings)
    rows = "\n".join(
        f"<tr{f' class={row.kind!r}' if row.kind else ''}>"
        + "".join(f"<td>{html.escape(text)}</td>" for text in row.texts)
        + "</tr>"
        for row in block.rows
    )
    return f"<table>\n<tr>{head}</tr>\n{rows}\n</table>"
