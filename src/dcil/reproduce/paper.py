"""Every number that the paper prints (Kim et al. 2022), as package data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True)
class PrintedNumber:
    """One number of one of the paper's tables. Accuracies are in percent.

    ``quoted``: taken by the paper from another one. ``suspect``: the paper contradicts itself there; ``note`` says how.
    """

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
def numbers() -> tuple[PrintedNumber, ...]:
    """Return all printed numbers, in the paper's order."""
    text = resources.files("dcil.reproduce").joinpath("paper.json").read_text(encoding="utf-8")
    return tuple(PrintedNumber(**fields) for fields in json.loads(text))
