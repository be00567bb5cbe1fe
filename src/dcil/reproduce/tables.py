"""Tables by name, the paper's and two further, and the cells of each."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

from dcil import METHODS, Weight
from dcil.errors import UserError, unknown
from dcil.reproduce import paper
from dcil.reproduce.cells import Cell, cell_for

#: Not in the paper: all methods that prune single weights, and DCIL whose super net takes a share of the batch.
BEYOND = "beyond"
R20 = ("cifar10", "resnet20")
WEIGHT_METHODS = tuple(name for name, kind in METHODS.items() if kind.prunes and Weight in kind.granularities)
BEYOND_METHODS = tuple(
    Cell(*R20, method, sparsity, kl=kl)
    for sparsity in (0.9, 0.95, 0.98)
    for method, kl in (*((name, True) for name in WEIGHT_METHODS), ("dcil", False))
)
BEYOND_CELLS = (
    Cell(*R20, "dense"),
    *BEYOND_METHODS,
    *(Cell(*R20, "dcil", 0.95, share=share) for share in (0.5, 0.25, 0.125)),
)
#: Not in the paper: transformers, and what in them should be private to each of DCIL's paths.
TRANSFORMERS = "transformers"
TRANSFORMER_CELLS = tuple(
    cell
    for dataset, model in (("shakespeare", "gpt-6-384"), ("cifar10", "vit-ti-4"))
    for cell in (
        Cell(dataset, model, "dense"),
        *(Cell(dataset, model, kind, s) for s in (0.5, 0.8, 0.9, 0.95) for kind in ("gmp", "dpf", "rigl", "dcil")),
        *(Cell(dataset, model, "dcil", s, private=own) for s in (0.9, 0.95) for own in ("norms", "head", "none")),
    )
)
UNTIED = "gpt-6-384-untied"
TRANSFORMER_CELLS += (Cell("shakespeare", UNTIED, "dense"),)
TRANSFORMER_CELLS += tuple(
    Cell("shakespeare", UNTIED, "dcil", sparsity, private=own) for sparsity in (0.9, 0.95) for own in (None, "norms")
)
#: What a CPU trains: the same choices in a small network, on the help texts of Python.
SMALL = ("pydoc", "gpt-4-128")
TRANSFORMER_CELLS += (Cell(*SMALL, "dense"), *(Cell(*SMALL, kind, 0.9) for kind in ("gmp", "dpf", "dcil")))
TRANSFORMER_CELLS += tuple(Cell(*SMALL, "dcil", 0.9, private=own) for own in ("norms", "head", "none"))
FURTHER = {BEYOND: BEYOND_CELLS, TRANSFORMERS: TRANSFORMER_CELLS}
SHARED_MODELS = ("resnet20", "resnet32")  # of a printed number without a model


def names() -> list[str]:
    """Return the names of all tables."""
    return [*dict.fromkeys(number.table for number in paper.numbers()), *FURTHER]


def parse_names(text: str) -> list[str]:
    """Return the tables that an argument selects: a name, a prefix of names, several with commas, or ``all``."""
    if text == "all":
        return names()
    selected: list[str] = []
    words = text.split(",")
    if "iterations" in words:
        raise UserError("iterations is not a table and must be given alone: dcil reproduce iterations")
    for word in words:
        matching = [word] if word in names() else [name for name in names() if word and name.startswith(word)]
        if not matching:
            raise unknown("table", word, [*names(), "iterations", "all"])
        selected += matching
    return list(dict.fromkeys(selected))


def cells_of(table: str) -> list[Cell]:
    """Return every cell of a table once, in its order."""
    if table in FURTHER:
        return list(FURTHER[table])
    cells: dict[Cell, None] = {}
    for number in paper.numbers():
        if number.table == table:
            cells |= dict.fromkeys(cells_for(number))
    # Every cell is compared with its dense network, whether the table prints that one or not.
    cells |= dict.fromkeys(cell.dense for cell in list(cells))
    return list(cells)


def seeds_of(cell: Cell, names: Iterable[str]) -> int:
    """Return with how many seeds the tables ask for a cell: three, as in the paper; ``beyond`` one of each method."""
    elsewhere = any(cell in cells_of(name) for name in names if name != BEYOND)
    return 1 if cell in BEYOND_METHODS and not elsewhere else 3


def cells_for(number: paper.PrintedNumber) -> list[Cell]:
    """Return the cells of a printed number: two where it has no model, else one."""
    models = SHARED_MODELS if number.model is None else (number.model,)
    return [cell for model in models if (cell := cell_for(number, model)) is not None]


def cells_of_all(tables: Iterable[str], pattern: str | None = None) -> list[Cell]:
    """Return the cells of several tables, each once, that ``pattern`` selects."""
    return select(list(dict.fromkeys(cell for table in tables for cell in cells_of(table))), pattern)


def select(cells: Sequence[Cell], pattern: str | None) -> list[Cell]:
    """Return the cells that ``pattern`` selects: words of ids, or patterns with *, several with commas."""
    if pattern is None:
        return list(cells)
    chosen = [cell for cell in cells if place_among(cell, pattern) is not None]
    if not chosen:
        raise UserError(f"--cells must match a cell, got {pattern!r} (for example {cells[-1].id})")
    return chosen


def place_among(cell: Cell, pattern: str | None) -> int | None:
    """Return the number of the first part of ``pattern`` that selects the cell: parts name their cells in the order in
    which they are trained. None if no part does."""
    parts = [] if pattern is None else pattern.split(",")
    return next((i for i, part in enumerate(parts) if part and matches(cell, part)), None)


def matches(cell: Cell, part: str) -> bool:
    """Match a pattern with * against the whole id, others against whole words of it, so that 0.9 is not 0.95."""
    if "*" in part:
        return fnmatch.fnmatchcase(cell.id, part)
    return re.search(rf"(^|[/-]){re.escape(part)}($|[/-])", cell.id) is not None


def all_cells() -> dict[str, Cell]:
    """Map id to cell, for all tables."""
    return {cell.id: cell for name in names() for cell in cells_of(name)}
