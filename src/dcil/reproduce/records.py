"""Records: the small JSON file that is kept of a run, and all that the results page is made from. No weights."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import dcil
from dcil import data
from dcil.reproduce.probe import read_observations
from dcil.reproduce.record_fields import EPOCH_COLUMNS, RECORD, SESSION
from dcil.reproduce.revisions import REVISIONS
from dcil.runs.atomic import write_text
from dcil.runs.checkpoint import check_metrics
from dcil.runs.damage import naming_file
from dcil.runs.environment import hardware
from dcil.runs.json_file import parse_object, read_bytes, read_text
from dcil.runs.schema import Check
from dcil.runs.seal import sealed, unsealed
from dcil.runs.summary import best_epoch
from dcil.train import RunFolder

FORMAT = "dcil record 1"
SESSIONS = "sessions.jsonl"
#: Column of the record -> digits kept: as many as a test set can resolve.
COLUMNS = dict.fromkeys(("top1", "top5", "top1_super", "top1_train"), 4)
COLUMNS |= {"train_loss": 5, "val_loss": 5, "sparsity": 6, "lr": 8, "seconds": 3}


@cache
def code_version() -> dict[str, Any]:
    """Return the version of the package, its revision and a digest of its files, and the commit if there is one."""
    root = Path(dcil.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    version = {"dcil": dcil.__version__, "source": digest.hexdigest()[:16], "revision": len(REVISIONS)}
    try:
        words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return version
    return version | {"commit": done.stdout.strip()}


def from_run_folder(folder: RunFolder, cell: str, trial: int | None) -> dict[str, Any]:
    """Build the record of a complete run from its folder."""
    summary = folder.summary()
    assert summary is not None
    rows = folder.metrics(summary["epochs"])
    check_metrics(folder.path / "metrics.jsonl", summary.get("metrics_sha256"), rows)
    columns = {
        name: [None if row.get(name) is None else round(row[name], digits) for row in rows]
        for name, digits in COLUMNS.items()
    }
    flips = [[len(row["updates"]), *(mean([u[i] for u in row["updates"]]) for i in (1, 2))] for row in rows]
    # A run of ``dcil train`` or ``dcil sweep`` has no probe.
    observed = read_observations(folder.path, len(rows)) or {"looks": [], "stays": None}
    return {
        "format": FORMAT,
        "cell": cell,
        **({"trial_epochs": trial} if trial else {}),
        "config": folder.record(),
        "sessions": read_sessions(folder.path),
        "environment": summary["environment"],
        "summary": {k: v for k, v in summary.items() if k not in ("environment", "layers", "metrics_sha256")},
        "layers": summary["layers"],
        "epochs": columns | {n: [f[i] for f in flips] for i, n in enumerate(("updates", "revived", "dropped"))},
        "around_changes": observed["looks"],
        "stays": observed["stays"],
    }


def append_session(folder: Path, done: int, **more: Any) -> None:
    """Append a session: after how many epochs it began, code version, environment and runs at once."""
    file = folder / SESSIONS
    with naming_file(file, "remove it"):
        torn = os.path.lexists(file) and not read_bytes(file).endswith(b"\n")
    with file.open("a", encoding="utf-8") as opened:
        opened.write("\n" * torn + json.dumps({"after": done, "code": code_version(), **more}) + "\n")


def read_sessions(folder: Path) -> list[dict[str, Any]]:
    """Return the sessions of a run, without a line that a kill cut short; none for runs of other commands."""
    file = folder / SESSIONS
    sessions: list[dict[str, Any]] = []
    if not os.path.lexists(file):
        return sessions
    with naming_file(file, "remove it"):
        lines = read_text(file).split("\n")
        for line in lines:
            with suppress(json.JSONDecodeError):
                sessions.append(parse_object(line))
                SESSION(sessions[-1], "")
    return sessions


def mean(values: list[int]) -> float | None:
    return round(statistics.fmean(values), 2) if values else None


def write(path: Path, record: dict[str, Any]) -> None:
    """Write a record and its checksum with one line per entry, so that differences between versions can be read."""
    record = sealed(record)
    entries = (f" {json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in record.items())
    write_text(path, "{\n" + ",\n".join(entries) + "\n}\n")


@dataclass(frozen=True)
class Record:
    """A record as the results page uses it."""

    path: Path
    cell: str
    seed: int
    raw: dict[str, Any]

    def column(self, name: str) -> list[Any]:
        values: list[Any] = self.raw["epochs"][name]
        return values

    @property
    def trial_epochs(self) -> int | None:
        """The number of epochs of a trial, None for a full run."""
        epochs: int | None = self.raw.get("trial_epochs")
        return epochs

    @property
    def last(self) -> float:
        return float(self.column("top1")[-1])

    @property
    def best_epoch(self) -> int:
        """Index of the epoch with the best top-1 among those as sparse as the result."""
        return best_epoch(self.column("top1"), self.column("sparsity"))

    @property
    def best(self) -> float:
        return float(self.column("top1")[self.best_epoch])

    @property
    def best_top5(self) -> float:
        """Top-5 at the epoch of the best top-1, as in the paper."""
        return float(self.column("top5")[self.best_epoch])

    @property
    def last_loss(self) -> float:
        return float(self.column("val_loss")[-1])

    @property
    def best_loss(self) -> float:
        """The lowest loss among the epochs that are as sparse as the result."""
        loss = self.column("val_loss")
        return float(loss[best_epoch(loss, self.column("sparsity"), sign=-1)])

    @property
    def std(self) -> float:
        return float(self.raw["summary"]["std_last_10pct"])

    def seconds_per_epoch(self) -> dict[tuple[str, int], float]:
        """Map (hardware, runs at once) to the median seconds per epoch."""
        sessions = [(s["after"], s) for s in self.raw["sessions"]]
        seconds = self.column("seconds")
        measured: dict[tuple[str, int], list[float]] = {}
        for (first, session), (end, _) in zip(sessions, [*sessions[1:], (len(seconds), None)], strict=False):
            where = hardware(session["environment"])
            # The first epoch of a session includes the recording of its graphs.
            measured.setdefault((where, session["at_once"]), []).extend(seconds[first + 1 : end] or seconds[first:end])
        medians = {key: statistics.median(values) for key, values in measured.items() if values}
        return {key: seconds for key, seconds in medians.items() if seconds > 0}


def naming_record(path: Path) -> AbstractContextManager[None]:
    """Name ``path`` in one line if its contents are wrong."""
    return naming_file(path, "restore it")


def read_json(path: Path, format_name: str, check: Check) -> dict[str, Any]:
    """Read a JSON object of the given format."""
    raw = parse_object(read_text(path))
    if raw.get("format") != format_name:
        raise ValueError(f"its format must be {format_name!r}")
    check(raw, "")
    return unsealed(raw)


def read(path: Path) -> Record:
    """Read and check a record."""
    with naming_record(path):
        raw = read_json(path, FORMAT, RECORD)
        record = Record(path, raw["cell"], raw["config"]["seed"], raw)
        if "/".join(path.parts[-3:]) != f"{record.cell}-seed{record.seed}.json":
            raise ValueError(f"it holds {record.cell}-seed{record.seed}")
        epochs: int = raw["config"]["total_epochs"]
        for name, column in raw["epochs"].items():
            if name in EPOCH_COLUMNS and len(column) != epochs:
                raise ValueError(f"column {name} must have {epochs} epochs, has {len(column)}")
        if any(raw["epochs"][name][-1] is None for name in ("top1", "top5")):
            raise ValueError("its last epoch must have an accuracy")
        if any(session["after"] > epochs for session in raw["sessions"]):
            raise ValueError(f"its sessions must begin within its {epochs} epochs")
        return record


def read_all(out: Path) -> list[Record]:
    """Read every record below ``out``, in the order of paths."""
    datasets = [*data.names(), "imagenet"]
    return [read(file) for dataset in datasets for file in sorted((out / dataset).glob("*/*-seed*.json"))]
