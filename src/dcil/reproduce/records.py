"""The record of a run: small enough for the repository, and all that the report is made from. No weights."""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import dcil
from dcil import data
from dcil.errors import UserError
from dcil.reproduce.probe import read_found
from dcil.runs.atomic import write_text
from dcil.runs.environment import hardware
from dcil.runs.summary import best_epoch
from dcil.train import RunFolder

FORMAT = "dcil record 1"
SESSIONS = "sessions.jsonl"
#: Column of the record -> digits kept: what a test set can resolve, not what a float can print.
COLUMNS = dict.fromkeys(("top1", "top5", "top1_super", "top1_train"), 4)
COLUMNS |= {"train_loss": 5, "sparsity": 6, "lr": 8, "seconds": 3}


@cache
def code() -> dict[str, str]:
    """The version of the code: of the package, of its files, and of the repository where there is one."""
    root = Path(dcil.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    found = {"dcil": dcil.__version__, "source": digest.hexdigest()[:16]}
    try:
        words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return found
    return found | {"commit": done.stdout.strip()}


def of_run(folder: RunFolder, cell: str, trial: int | None) -> dict[str, Any]:
    """The record of a complete run, from its folder alone."""
    summary = folder.summary()
    assert summary is not None
    rows = folder.metrics(summary["epochs"])
    columns = {
        name: [None if row[name] is None else round(row[name], digits) for row in rows]
        for name, digits in COLUMNS.items()
    }
    flips = [[len(row["updates"]), *(mean([u[i] for u in row["updates"]]) for i in (1, 2))] for row in rows]
    # A run of ``dcil train`` or ``dcil sweep`` was not watched: its record says so.
    found = read_found(folder.path, len(rows)) or {"looks": [], "stays": None}
    return {
        "format": FORMAT,
        "cell": cell,
        **({"trial_epochs": trial} if trial else {}),
        "config": folder.record(),
        "sessions": read_sessions(folder.path),
        "environment": summary["environment"],
        "summary": {k: v for k, v in summary.items() if k not in ("environment", "layers")},
        "layers": summary["layers"],
        "epochs": columns | {n: [f[i] for f in flips] for i, n in enumerate(("updates", "revived", "dropped"))},
        "around_changes": found["looks"],
        "stays": found["stays"],
    }


def note_session(folder: Path, done: int, **more: Any) -> None:
    """A run may go on elsewhere: from which epoch on, with what code, on what hardware, beside how many others."""
    file = folder / SESSIONS
    torn = file.exists() and not file.read_bytes().endswith(b"\n")
    with file.open("a", encoding="utf-8") as opened:
        opened.write("\n" * torn + json.dumps({"after": done, "code": code(), **more}) + "\n")


def read_sessions(folder: Path) -> list[dict[str, Any]]:
    """The sessions of a run, but for a line that a kill cut short; none of one that was trained by other commands."""
    found: list[dict[str, Any]] = []
    if not (folder / SESSIONS).exists():
        return found
    for line in (folder / SESSIONS).read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def mean(values: list[int]) -> float | None:
    return round(statistics.fmean(values), 2) if values else None


def write(path: Path, record: dict[str, Any]) -> None:
    """One line per entry: a reader of the repository's history sees what changed."""
    entries = (f" {json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in record.items())
    write_text(path, "{\n" + ",\n".join(entries) + "\n}\n")


@dataclass(frozen=True)
class Record:
    """A record as the report needs it."""

    path: Path
    cell: str
    seed: int
    raw: dict[str, Any]

    def column(self, name: str) -> list[Any]:
        values: list[Any] = self.raw["epochs"][name]
        return values

    @property
    def trial(self) -> int | None:
        """The epochs it was shortened to, if it was."""
        found: int | None = self.raw.get("trial_epochs")
        return found

    @property
    def last(self) -> float:
        return float(self.column("top1")[-1])

    @property
    def best_epoch(self) -> int:
        """Its index: the best top-1 of the epochs that are as sparse as the result."""
        return best_epoch(self.column("top1"), self.column("sparsity"))

    @property
    def best(self) -> float:
        return float(self.column("top1")[self.best_epoch])

    @property
    def best_top5(self) -> float:
        """At the epoch of the best top-1, as the paper takes it."""
        return float(self.column("top5")[self.best_epoch])

    @property
    def std(self) -> float:
        return float(self.raw["summary"]["std_last_10pct"])

    def pace(self) -> dict[tuple[str, int], float]:
        """(hardware, runs beside each other) -> median seconds per epoch there."""
        marks = [(int(s["after"]), s) for s in self.raw["sessions"]]
        seconds = self.column("seconds")
        found: dict[tuple[str, int], list[float]] = {}
        for (first, session), (end, _) in zip(marks, [*marks[1:], (len(seconds), None)], strict=False):
            where = hardware(session["environment"])
            # The first epoch of a session also records its graphs.
            found.setdefault((where, session["at_once"]), []).extend(seconds[first + 1 : end] or seconds[first:end])
        return {key: statistics.median(values) for key, values in found.items() if values}


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Whatever is wrong with a file that was made by hand or by us is said in one line with its name."""
    try:
        yield
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); restore it") from None


def read(path: Path) -> Record:
    """The record in a file."""
    with naming(path):
        raw = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise ValueError(f"it is not a {FORMAT}")
        found = Record(path, str(raw["cell"]), int(raw["config"]["seed"]), raw)
        if path.parts[-3:] != Path(f"{found.cell}-seed{found.seed}.json").parts:
            raise ValueError(f"it holds {found.cell}-seed{found.seed}")
        epochs = int(raw["config"]["total_epochs"])
        for name in (*COLUMNS, "updates", "revived", "dropped"):
            if len(found.column(name)) != epochs:
                raise ValueError(f"column {name} does not have {epochs} epochs")
        _ = found.last, found.best, found.best_top5, found.std, found.pace()
        raw["stays"] is None or raw["stays"]["ended"], raw["around_changes"], raw["layers"], raw["environment"]
        return found


def read_all(out: Path) -> list[Record]:
    """Every record below ``out``, by path."""
    places = [*data.names(), "imagenet"]
    return [read(file) for place in places for file in sorted((out / place).glob("*/*-seed*.json"))]
