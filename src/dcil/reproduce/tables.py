"""The tables by name, the paper's and one of our own, and the cells of each."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

from dcil.errors import UserError, unknown
from dcil.reproduce import paper
from dcil.reproduce.cells import Cell, cell_of

#: Not in the paper: DCIL without KL at both sparsities, and the methods it cites but did not train here.
BEYOND = "beyond"
BEYOND_CELLS = tuple(
    Cell("cifar10", "resnet20", method, sparsity, kl=kl)
    for method, kl in (("dcil", False), ("gmp", True), ("set", True), ("rigl", True), ("sm", True), ("dsr", True))
    for sparsity in (0.9, 0.95)
)
SHARED_MODELS = ("resnet20", "resnet32")  # what a row without a model stands for


def names() -> list[str]:
    return [*dict.fromkeys(row.table for row in paper.rows()), BEYOND]


def named(text: str) -> list[str]:
    """The tables that a word of the command line means: a name, the beginning of names, several with commas, all."""
    if text == "all":
        return names()
    found: list[str] = []
    words = text.split(",")
    if "iterations" in words:
        raise UserError("iterations is not a table: give it alone, `dcil reproduce iterations`")
    for word in words:
        matching = [word] if word in names() else [name for name in names() if word and name.startswith(word)]
        if not matching:
            raise unknown("table", word, [*names(), "iterations", "all"])
        found += matching
    return list(dict.fromkeys(found))


def cells_of(table: str) -> list[Cell]:
    """Every cell once, in the order of the table."""
    if table == BEYOND:
        return list(BEYOND_CELLS)
    found: dict[Cell, None] = {}
    for row in paper.rows():
        if row.table == table:
            models = SHARED_MODELS if row.model is None else (row.model,)
            found |= dict.fromkeys(cell for model in models if (cell := cell_of(row, model)) is not None)
    # Everything is compared with its dense network, whether the table prints that or not.
    found |= dict.fromkeys(cell.dense for cell in list(found))
    return list(found)


def cells(tables: Iterable[str], pattern: str | None = None) -> list[Cell]:
    """The cells of several tables, each once; ``pattern``: words of ids, or patterns with *, several with commas."""
    return select(list(dict.fromkeys(cell for table in tables for cell in cells_of(table))), pattern)


def select(found: Sequence[Cell], pattern: str | None) -> list[Cell]:
    """Those that the words or patterns mean."""
    if pattern is None:
        return list(found)
    chosen = [cell for cell in found if matches(cell, pattern.split(","))]
    if not chosen:
        raise UserError(f"--cells {pattern}: no cell has that in its name; they are like {found[-1].id}")
    return chosen


def matches(cell: Cell, patterns: Sequence[str]) -> bool:
    """A pattern with * is for the whole id; others are whole words of it, so that 0.9 is not 0.95."""
    return any(
        fnmatch.fnmatchcase(cell.id, pattern)
        if "*" in pattern
        else re.search(rf"(^|[/-]){re.escape(pattern)}($|[/-])", cell.id)
        for pattern in patterns
        if pattern
    )


def known() -> dict[str, Cell]:
    """id -> cell, of all tables."""
    return {cell.id: cell for name in names() for cell in cells_of(name)}
