"""Runs as text, for processes on other machines: all of it JSON, so that no state of ours is pickled."""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from dcil import data
from dcil.engine import EngineSettings
from dcil.runs.folder import RunFolder
from dcil.runs.progress import Progress
from dcil.train.config import Config, from_record, to_json
from dcil.train.loop import train
from dcil.train.plan import PlannedRun

#: Loads a data set once for the runs that a process trains one after the other.
load_once = lru_cache(maxsize=2)(data.load)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where runs are trained: paths that mean the same on every machine, and a device of each."""

    data_dir: Path
    device: str
    settings: EngineSettings

    def record(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        settings = dataclasses.asdict(self.settings)
        return {"data_dir": str(self.data_dir.absolute()), "device": self.device, "settings": settings}

    @classmethod
    def of(cls, record: dict[str, Any]) -> Place:
        return cls(Path(record["data_dir"]), record["device"], EngineSettings(**record["settings"]))


def config_record(config: Config) -> dict[str, Any]:
    """Return a config as config.json has it."""
    record: dict[str, Any] = json.loads(to_json(config, config.build_method(1), {}))
    return record


def to_text(run: PlannedRun, place: Place, checkpoint_minutes: float) -> str:
    """Return what ``train_text`` trains."""
    return json.dumps(
        {
            "folder": str(run.folder.path.absolute()),
            "config": config_record(run.config),
            "place": place.record(),
            "checkpoint_minutes": checkpoint_minutes,
        }
    )


def train_text(text: str, progress: Progress) -> None:
    """Train the run that ``text`` describes in its folder, from its checkpoint if there is one."""
    given = json.loads(text)
    folder, minutes = RunFolder(Path(given["folder"])), given["checkpoint_minutes"]
    train_at(Place.of(given["place"]), from_record(given["config"]), folder, progress, minutes)


def train_at(place: Place, config: Config, folder: RunFolder, progress: Progress, checkpoint_minutes: float) -> None:
    """Train ``config`` in ``folder``, with a data set that is loaded once in a process."""
    where = place.data_dir, torch.device(place.device)
    train(config, folder, *where, progress, place.settings, load_once, checkpoint_minutes=checkpoint_minutes)
