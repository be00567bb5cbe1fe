"""search.json: the space of a search, the values of its trials, and how each of them ended. What was trained is in
their run folders."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dcil.errors import UserError
from dcil.runs.atomic import write_text
from dcil.runs.damage import naming_file
from dcil.runs.json_file import parse_object, read_text
from dcil.runs.schema import anything, fields, list_of, mapping_of, text, whole
from dcil.runs.seal import sealed, unsealed

NAME, FORMAT = "search.json", "dcil search 1"
COMPLETE, STOPPED, FAILED, UNFINISHED = "complete", "stopped", "failed", "unfinished"
TRIAL = fields({"name": text, "values": mapping_of(anything), "ended": text, "epochs": whole(0), "reason": text})
SEARCH = fields(
    {
        "format": text,
        "space": mapping_of(text),
        "base": mapping_of(anything),
        "score": text,
        "grace": whole(1),
        "trials": list_of(TRIAL),
    }
)


@dataclass
class Trial:
    """A trial: its run folder's name, its values, how it ended, after how many epochs, and why if it failed."""

    name: str
    values: dict[str, Any]
    ended: str = UNFINISHED
    epochs: int = 0
    reason: str = ""


@dataclass
class SearchRecord:
    """
    space    name of a drawn option or setting -> its range or list, as it was typed
    base     the options that all trials share, and the recipe
    score    the metric by which trials are compared: top1, or val_loss of a text
    grace    epochs before a trial may be stopped
    """

    space: dict[str, str]
    base: dict[str, Any]
    score: str
    grace: int
    trials: list[Trial] = field(default_factory=list)

    def trial(self, name: str, values: Mapping[str, Any]) -> Trial:
        """Return the trial called ``name``, a new one if there is none."""
        for trial in self.trials:
            if trial.name == name:
                return trial
        self.trials.append(Trial(name, dict(values)))
        return self.trials[-1]

    def write(self, out: Path) -> None:
        write_text(out / NAME, json.dumps(sealed({"format": FORMAT, **asdict(self)}), indent=1))

    def resume(self, out: Path) -> SearchRecord:
        """Return the record below ``out``, which must be of this search, or this one if there is none."""
        there = read(out)
        if there is None:
            return self
        for name in ("space", "base", "grace"):
            before, now = getattr(there, name), json.loads(json.dumps(getattr(self, name)))
            if before != now:
                raise UserError(f"{out / NAME} is of a search with {name} {before}, got {now}; choose another --out")
        return there


def read(out: Path) -> SearchRecord | None:
    """Read the search whose trials are below ``out``; None if there is none."""
    file = out / NAME
    if not os.path.lexists(file):
        return None
    with naming_file(file, "restore it, or choose another --out"):
        found = parse_object(read_text(file))
        SEARCH(found, "")
        found = unsealed(found)
        if found.pop("format") != FORMAT:
            raise ValueError(f"its format must be {FORMAT!r}")
        if any(trial["values"].keys() != found["space"].keys() for trial in found["trials"]):
            raise ValueError("every trial must have a value for each setting")
        return SearchRecord(**found | {"trials": [Trial(**trial) for trial in found["trials"]]})
