"""List methods, models, data sets and recipes, or the settings of one method."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from dcil import METHODS, Method, data, models
from dcil.cli.parser import Parser, say
from dcil.errors import unknown
from dcil.train import RECIPES
from dcil.train.method_settings import FLAGS, GRANULARITIES, PARTS


def main(words: Sequence[str]) -> int:
    parser = Parser("dcil list", __doc__)
    parser.add_argument("method", nargs="?", help="method whose settings are listed")
    method = parser.parse(words).method
    console = Console()
    if method is None:
        console.print(overview())
        say("dcil list METHOD lists the settings of a method.")
        return 0
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    kind = METHODS[method]
    say(f"{inspect.getdoc(kind)}\n\nSettings of every method:\n\n{inspect.getdoc(Method)}\n")
    table = Table("setting", "default", "how to set it")
    for field in dataclasses.fields(kind):
        default = "" if field.default is dataclasses.MISSING else repr(field.default)
        values = PARTS.get(typing.get_type_hints(kind)[field.name])
        set_by = f"--set {field.name}={'|'.join(values) if values else '…'}"
        table.add_row(field.name, default, FLAGS.get(field.name, set_by))
    console.print(table)
    return 0


def overview() -> Table:
    """Return a table of all names."""
    table = Table("what", "names", show_lines=True)
    table.add_row("methods", "\n".join(f"{name:10} {first_line(kind)}" for name, kind in METHODS.items()))
    forms = "".join(f"\n{form}: {meaning}" for form, meaning in models.FORMS.items())
    table.add_row("models", ", ".join(models.names()) + forms)
    table.add_row("data sets", ", ".join(data.names()))
    table.add_row("granularities", ", ".join(GRANULARITIES) + "; N:M such as 2:4")
    table.add_row("recipes", ", ".join(RECIPES))
    return table


def first_line(kind: type) -> str:
    """Return the first line of the docstring of a method's module."""
    module = inspect.getmodule(kind)
    return ((module and module.__doc__) or "").strip().splitlines()[0]
