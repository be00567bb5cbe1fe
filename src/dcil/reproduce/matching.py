"""Check that a record matches the recipe of its cell: records of other settings must not be counted with it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from dcil.reproduce.cells import Cell
from dcil.reproduce.estimate import cached_config
from dcil.train.config import to_json
from dcil.train.restore import data_of


def matches_recipe(recorded: Mapping[str, Any], cell: Cell, trial: int | None) -> bool:
    """Compare a recorded config with the cell's present one, the method's settings included."""
    config = dataclasses.replace(cached_config(cell, trial), seed=recorded["seed"])
    method = config.build_method(recorded["method"]["epoch_steps"])
    return settings_equal(recorded, json.loads(to_json(config, method, data_of(recorded))))


def settings_equal(recorded: Any, present: Any) -> bool:
    """Compare the settings that the record has; others were added to the package after it was written."""
    if isinstance(recorded, dict) and isinstance(present, dict):
        return all(settings_equal(recorded[name], value) for name, value in present.items() if name in recorded)
    return bool(recorded == present)
