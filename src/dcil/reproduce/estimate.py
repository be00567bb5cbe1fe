"""Estimated training time: from records of the same network, or else from the rough time of a step on one H200."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from dcil import METHODS
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
    "gpt-6-384": 12.5,
    "gpt-6-384-untied": 12.5,
    "gpt-4-128": 2.0,
    "vit-ti-4": 20.0,
}
TWO_PATHS = 1.5  # time of a step of DCIL, which runs two paths, relative to other methods: the paper's figure
IMAGES = {"digits": 1437, "cifar10": 50_000, "cifar100": 50_000, "imagefolder": 1_281_167}
TRAINED_TOKENS = {"shakespeare": 1_003_854, "pydoc": 450_000}  # of pydoc: about, it depends on the version of Python
DEFAULT_STEP_MS = 5.0
GUESSED = "an H200, by guess"


class StepTime(NamedTuple):
    """Seconds per step of a recorded run, on ``hardware`` with ``at_once`` runs at once."""

    method: str
    dataset: str
    hardware: str
    at_once: int
    seconds: float


class Pace(NamedTuple):
    """Estimated seconds per epoch, the hardware that they were measured on, and what was measured, in words."""

    seconds: float
    hardware: str
    basis: str


class Estimate:
    """Estimates times of runs, ``at_once`` of them on a device, from records of this ``hardware`` if there are any."""

    def __init__(self, records: Iterable[Record], at_once: int = 1, hardware: str = "") -> None:
        self.at_once, self.hardware = at_once, hardware
        self.measured: dict[str, list[StepTime]] = {}  # by network
        self.used: set[str] = set()  # hardware that estimates rest on
        for record in records:
            dataset, model, name = record.cell.split("/")
            method, steps = name.partition("-")[0], record.raw["config"]["method"]["epoch_steps"]
            if method in METHODS:
                self.measured.setdefault(model, []).extend(
                    StepTime(method, dataset, *place, seconds / steps)
                    for place, seconds in record.seconds_per_epoch().items()
                )

    def pace(self, run: CellRun) -> Pace:
        """Return the time of an epoch of ``run`` beside as many other runs as there are at once."""
        config = cached_config(run.cell, run.epochs)
        steps = -(-inputs_per_epoch(config) // config.batch)
        if known := nearest_records(self.measured.get(run.cell.model, []), run.cell, self.hardware):
            at_once = min((time.at_once for time in known), key=lambda at_once: abs(at_once - self.at_once))
            chosen = [time for time in known if time.at_once == at_once]
            step = statistics.median(time.seconds * paths_ratio(run.cell.method, time.method) for time in chosen)
            # Runs share the device: more of them at once take proportionally longer.
            seconds = steps * step * self.at_once / at_once
            hardware = " and ".join(sorted({time.hardware for time in chosen}))
            found = Pace(seconds, hardware, f"{described(chosen, run.cell)} on {hardware}, {at_once} at once")
        else:
            step_ms = STEP_MS.get(run.cell.model, DEFAULT_STEP_MS) * paths_ratio(run.cell.method, "dense")
            found = Pace(steps * step_ms / 1000 * self.at_once, GUESSED, GUESSED)
        self.used.add(found.hardware)
        return found

    @property
    def basis(self) -> str:
        """The other hardware that the estimates rest on, if any, as the end of a sentence."""
        others = sorted(self.used - {self.hardware})
        return f", as on {' and '.join(others)}" if others else ""

    def seconds_left(self, run: CellRun) -> float:
        """Return the seconds from the present state of a run to its end."""
        file = run.folder.path / "metrics.jsonl"
        with naming_file(file):
            done = read_bytes(file).count(b"\n") if os.path.lexists(file) else 0
        return self.pace(run).seconds * max(0, cached_config(run.cell, run.epochs).total_epochs - done)

    def seconds(self, run: CellRun) -> float:
        """Return the seconds of a whole run."""
        return self.pace(run).seconds * cached_config(run.cell, run.epochs).total_epochs

    def seconds_per_epoch(self, run: CellRun) -> float:
        return self.pace(run).seconds


def inputs_per_epoch(config: Config) -> int:
    """Return the number of images, or of sequences of a text, that an epoch trains on."""
    tokens = TRAINED_TOKENS.get(config.dataset)
    return IMAGES[config.dataset] if tokens is None else tokens // config.length - 1


def rough_seconds(config: Config) -> float:
    """Return the rough time of a run on one H200: to sort runs by, where there are no records."""
    inputs = inputs_per_epoch(config) if config.dataset in (*IMAGES, *TRAINED_TOKENS) else 10**6
    step_ms = STEP_MS.get(config.model, DEFAULT_STEP_MS) * paths_ratio(config.method, "dense")
    return config.total_epochs * -(-inputs // config.batch) * step_ms / 1000


def nearest_records(times: Sequence[StepTime], cell: Cell, hardware: str) -> list[StepTime]:
    """Return the times of the network that say most about ``cell``: of this hardware, its method, as many paths, its
    data set, in this order of importance."""
    for matches in (
        lambda time: time.hardware == hardware,
        lambda time: time.method == cell.method,
        lambda time: number_of_paths(time.method) == number_of_paths(cell.method),
        lambda time: time.dataset == cell.dataset,
    ):
        times = [time for time in times if matches(time)] or times
    return list(times)


def number_of_paths(method: str) -> int:
    return len(METHODS[method].paths)


def paths_ratio(wanted: str, measured: str) -> float:
    """Return how much longer a step of one method takes than that of another, by the number of their paths."""
    return float(TWO_PATHS ** (number_of_paths(wanted) - number_of_paths(measured)))


def described(times: Sequence[StepTime], cell: Cell) -> str:
    """Name the records of a network that an estimate rests on."""
    methods = ", ".join(sorted({time.method for time in times}))
    datasets = " and ".join(sorted({time.dataset for time in times}))
    return f"as {methods} of {cell.model}" + ("" if datasets == cell.dataset else f" ({datasets})")


@cache  # checking a config builds its network
def cached_config(cell: Cell, epochs: int | None) -> Config:
    """Return the config of seed 0, built once per cell."""
    return cell.config(0, epochs)
