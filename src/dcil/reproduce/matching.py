"""Does a record belong to its cell? One of another recipe, or of older settings, must not be counted with it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from dcil.reproduce.cells import Cell
from dcil.reproduce.estimate import plan
from dcil.train.config import to_json


def fits(found: Mapping[str, Any], cell: Cell, trial: int | None) -> bool:
    """Was a recorded config that of the cell today, with all the settings of its method?"""
    config = dataclasses.replace(plan(cell, trial), seed=found["seed"])
    method = config.build_method(found["method"]["epoch_steps"])
    wanted = json.loads(to_json(config, method, found["classes"], found["shape"]))
    return same(found, wanted) and same(found["method"], wanted["method"])


def same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Settings that a record does not have yet came later."""
    return all(found[name] == value for name, value in wanted.items() if name in found and name != "method")
