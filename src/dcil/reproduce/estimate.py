"""Estimated training time: from the records, or from the time of a step on one H200."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from dcil.reproduce.cells import Cell
from dcil.reproduce.records import Record
from dcil.reproduce.session import CellRun
from dcil.runs.damage import naming_file
from dcil.runs.json_file import read_bytes
from dcil.train import Config

#: Milliseconds of a dense step, one run alone on an H200 in bf16; rough, used until there are records.
STEP_MS = {
    "resnet8-digits": 5.0,
    "resnet20": 0.8,
    "resnet32": 1.2,
    "resnet56": 2.1,
    "resnet56-bottleneck": 3.2,
    "wrn-28-2": 1.9,
    "wrn-28-4": 3.6,
    "wrn-28-8": 10.0,
    "resnet18": 30.0,
    "resnet50": 450.0,
}
DCIL_FACTOR = 1.5  # time of a step of DCIL, which runs two paths, relative to other methods: the paper's figure
IMAGES = {"digits": 1437, "cifar10": 50_000, "cifar100": 50_000, "imagefolder": 1_281_167}
DEFAULT_STEP_MS = 5.0
GUESSED = "an H200, by guess"


class EpochTime(NamedTuple):
    """Seconds per epoch, measured on ``hardware`` with ``at_once`` runs at once."""

    hardware: str
    at_once: int
    seconds: float


class Estimate:
    """Estimates times of runs, ``at_once`` of them on a device, from records of this ``hardware`` if there are any."""

    def __init__(self, records: Iterable[Record], at_once: int = 1, hardware: str = "") -> None:
        self.at_once, self.hardware = at_once, hardware
        self.measured: dict[tuple[str, str, str], list[EpochTime]] = {}
        self.other_hardware: set[str] = set()  # that an estimate rests on
        for record in records:
            dataset, model, name = record.cell.split("/")
            times = self.measured.setdefault((dataset, model, name.partition("-")[0]), [])
            times += [EpochTime(*place, seconds) for place, seconds in record.seconds_per_epoch().items()]

    def _epoch_seconds(self, cell: Cell, config: Config) -> float:
        """Return seconds per epoch: measured for this model and method, or guessed."""
        known = self.measured.get((cell.dataset, cell.model, cell.method), [])
        known = [time for time in known if time.hardware == self.hardware] or known
        if known:
            nearest = min((time.at_once for time in known), key=lambda at_once: abs(at_once - self.at_once))
            chosen = [time for time in known if time.at_once == nearest]
            self.other_hardware |= {time.hardware for time in chosen} - {self.hardware}
            # Runs share the device: more of them at once take proportionally longer.
            return statistics.median(time.seconds for time in chosen) * self.at_once / nearest
        self.other_hardware.add(GUESSED)
        steps = -(-IMAGES[config.dataset] // config.batch)
        step_ms = STEP_MS.get(cell.model, DEFAULT_STEP_MS) * (DCIL_FACTOR if cell.method == "dcil" else 1.0)
        return steps * step_ms / 1000 * self.at_once

    @property
    def basis(self) -> str:
        """The other hardware that the estimates rest on, if any, as the end of a sentence."""
        return f", as on {' and '.join(sorted(self.other_hardware))}" if self.other_hardware else ""

    def seconds_left(self, run: CellRun) -> float:
        """Return the seconds from the present state of a run to its end."""
        config = cached_config(run.cell, run.epochs)
        file = run.folder.path / "metrics.jsonl"
        with naming_file(file):
            done = read_bytes(file).count(b"\n") if os.path.lexists(file) else 0
        return self._epoch_seconds(run.cell, config) * max(0, config.total_epochs - done)

    def seconds_per_epoch(self, run: CellRun) -> float:
        return self._epoch_seconds(run.cell, cached_config(run.cell, run.epochs))


@cache  # checking a config builds its network
def cached_config(cell: Cell, epochs: int | None) -> Config:
    """Return the config of seed 0, built once per cell."""
    return cell.config(0, epochs)
