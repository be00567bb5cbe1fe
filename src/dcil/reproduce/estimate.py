"""How long a run will take: from the records there are, or from what a step takes on one H200."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from dcil.reproduce.cells import Cell
from dcil.reproduce.records import Record
from dcil.reproduce.session import Run
from dcil.train import Config

#: Milliseconds of a dense step, one run alone on an H200 in bf16; only the order matters until there are records.
STEP = {
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
PATHS = 1.5  # a step of DCIL, which runs two paths, against a step of the others: the paper's own figure
IMAGES = {"digits": 1437, "cifar10": 50_000, "cifar100": 50_000, "imagefolder": 1_281_167}
UNKNOWN_STEP = 5.0
GUESSED = "an H200, by guess"


class Pace(NamedTuple):
    """Seconds per epoch, measured on ``hardware`` with ``beside`` runs at once."""

    hardware: str
    beside: int
    seconds: float


class Estimate:
    """Times of runs of which ``at_once`` share one device, from records, of this ``hardware`` if there are any."""

    def __init__(self, records: Iterable[Record], at_once: int = 1, hardware: str = "") -> None:
        self.at_once, self.hardware = at_once, hardware
        self.measured: dict[tuple[str, str, str], list[Pace]] = {}
        self.elsewhere: set[str] = set()  # other hardware that an answer rests on
        for record in records:
            dataset, model, name = record.cell.split("/")
            found = self.measured.setdefault((dataset, model, name.partition("-")[0]), [])
            found += [Pace(where, beside, seconds) for (where, beside), seconds in record.pace().items()]

    def epoch(self, cell: Cell, config: Config) -> float:
        """Seconds per epoch: measured for this model and method, or guessed."""
        known = self.measured.get((cell.dataset, cell.model, cell.method), [])
        known = [pace for pace in known if pace.hardware == self.hardware] or known
        if known:
            nearest = min((pace.beside for pace in known), key=lambda beside: abs(beside - self.at_once))
            chosen = [pace for pace in known if pace.beside == nearest]
            self.elsewhere |= {pace.hardware for pace in chosen} - {self.hardware}
            # What a run costs is its share of the device.
            return statistics.median(pace.seconds for pace in chosen) * self.at_once / nearest
        self.elsewhere.add(GUESSED)
        steps = -(-IMAGES[config.dataset] // config.batch)
        step = STEP.get(cell.model, UNKNOWN_STEP) * (PATHS if cell.method == "dcil" else 1.0)
        return steps * step / 1000 * self.at_once

    @property
    def basis(self) -> str:
        """What the answers rest on, if that is not this hardware."""
        return f", as on {' and '.join(sorted(self.elsewhere))}" if self.elsewhere else ""

    def left(self, run: Run) -> float:
        """Seconds to the end of a run, from where it stands."""
        config = plan(run.cell, run.epochs)
        file = run.folder.path / "metrics.jsonl"
        done = file.read_bytes().count(b"\n") if file.exists() else 0
        return self.epoch(run.cell, config) * max(0, config.total_epochs - done)

    def per_epoch(self, run: Run) -> float:
        return self.epoch(run.cell, plan(run.cell, run.epochs))


@cache  # a config builds its network to check itself; the seeds of a cell share one here
def plan(cell: Cell, epochs: int | None) -> Config:
    return cell.config(0, epochs)
