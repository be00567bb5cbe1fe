"""Every number that the paper prints (Kim et al. 2022), as package data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True)
class Row:
    """One printed number. Accuracies in percent; ``quoted`` from another paper; ``suspect``: the paper disagrees
    with itself there, and ``note`` says how."""

    table: str
    dataset: str
    method: str
    granularity: str
    sparsity: float
    metric: str
    model: str | None = None  # None: one number for ResNet-20 and ResNet-32
    mean: float | None = None  # None: does not converge
    std: float | None = None
    quoted: bool = False
    note: str = ""
    basis: str = ""
    suspect: bool = False
    dense_source: str = ""
    warmup_epochs: int | None = None
    target_epoch: int | None = None
    finetune_epochs: int = 0


@cache
def rows() -> tuple[Row, ...]:
    """All of them, in the paper's order."""
    text = resources.files("dcil.reproduce").joinpath("paper.json").read_text(encoding="utf-8")
    return tuple(Row(**row) for row in json.loads(text))
