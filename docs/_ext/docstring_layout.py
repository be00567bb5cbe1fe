"""Docstrings of this package as reStructuredText: indented blocks, aligned lists, and * and | as they stand."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap

from sphinx.application import Sphinx

from dcil import Method

ITEM = re.compile(r"^(\S(?:\S| (?! ))*)  +(\S.*)$")
PARAGRAPH = re.compile(r"^(Original|Protocol|Against the authors' code)\b.*?:")


def escape(line: str) -> str:
    """Protect what reStructuredText would read as markup, outside of ``literals``."""
    parts = re.split(r"(``.+?``)", line)
    parts[::2] = [re.sub(r"([*|`])|(?<=\w)(_)(?!\w)", r"\\\g<0>", part) for part in parts[::2]]
    return "".join(parts)


def is_python(block: list[str]) -> bool:
    try:
        ast.parse(textwrap.dedent("\n".join(block)))
    except SyntaxError:
        return False
    return True


def code(block: list[str]) -> list[str]:
    """An indented block: Python where it is, else text (equations)."""
    while block and not block[-1]:
        block.pop()
    kind = "python" if is_python(block) else "text"
    inside = textwrap.indent(textwrap.dedent("\n".join(block)), "    ")
    return ["", f".. code-block:: {kind}", "", *inside.split("\n"), ""]


def layout(lines: list[str]) -> list[str]:
    """Return a docstring's lines as reStructuredText."""
    found: list[str] = []
    place = 0
    while place < len(lines):
        line = lines[place]
        item = ITEM.match(line)
        if line.startswith("    "):
            block = []
            while place < len(lines) and (not lines[place] or lines[place].startswith("    ")):
                block.append(lines[place])
                place += 1
            found += code(block)
            continue
        place += 1
        if item:
            text = [item[2]]
            while place < len(lines) and lines[place].startswith("    "):
                text.append(lines[place].strip())
                place += 1
            names = ", ".join(f"``{name}``" for name in item[1].split(", "))
            found += ([""] if found and not found[-1].startswith("    ") else []) + [
                names,
                f"    {escape(' '.join(text))}",
            ]
            if place < len(lines) and not ITEM.match(lines[place]):
                found.append("")
        else:
            found += [""] if PARAGRAPH.match(line) else []
            found.append(escape(line))
    return found


def docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    lines[:] = layout(lines)


def signature(app: Sphinx, what: str, name: str, obj: object, *rest: object) -> tuple[str, None] | None:
    """Of a method, what it adds or changes: the other settings are those of Method."""
    if not (inspect.isclass(obj) and issubclass(obj, Method)) or obj is Method:
        return None
    base = {field.name: field.default for field in dataclasses.fields(Method)}
    own = [f for f in dataclasses.fields(obj) if f.init and (f.name not in base or f.default != base[f.name])]
    return "(*, sparsity, steps, " + "".join(f"{f.name}={f.default!r}, " for f in own) + "…)", None


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", docstring)
    app.connect("autodoc-process-signature", signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
