"""Read and check the files of a run folder: config.json, metrics.jsonl and summary.json.

``read_config``, ``read_metrics`` and ``read_summary`` return the contents as they are; ``read_run`` puts them together
as a ``RecordedRun``. Whatever is wrong with a file is a UserError in one line that names it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from dcil.errors import UserError
from dcil.runs.damage import ANEW, UnreadableFile, naming_file
from dcil.runs.summary import Summary, summarise

T = TypeVar("T")
#: How an error names the type that a field must have.
KINDS = {str: "a string", int: "a whole number", float: "a finite number", dict: "an object", list: "a list"}


@dataclass(frozen=True)
class MaskUpdate:
    """One mask update: its step, the weights it revived and the weights it dropped."""

    step: int
    revived: int
    dropped: int


@dataclass(frozen=True)
class EpochMetrics:
    """One line of metrics.jsonl, accuracies in percent; ``row`` is the whole line."""

    epoch: int
    sparsity: float
    top1: float
    top1_super: float | None
    seconds: float
    updates: tuple[MaskUpdate, ...]
    row: Mapping[str, Any]


@dataclass(frozen=True)
class LayerCount:
    """The weights of one prunable parameter and how many of them are kept."""

    weights: int
    kept: int

    @property
    def sparsity(self) -> float:
        return 1 - self.kept / self.weights if self.weights else 0.0


@dataclass(frozen=True)
class RecordedRun:
    """One run, finished or not. Numbers are None where a run has not come far enough to have them."""

    folder: Path
    label: str
    dataset: str
    model: str
    method: str
    granularity: str
    seed: int
    planned: int
    config: Mapping[str, Any]
    epochs: tuple[EpochMetrics, ...]
    complete: bool = False
    summary: Summary | None = None
    sparsity: float | None = None
    seconds: float = 0.0
    weights: int | None = None
    kept: int | None = None
    layers: Mapping[str, LayerCount] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def dense(self) -> bool:
        return self.method.lower() == "dense"

    @property
    def status(self) -> str:
        """Return how far an unfinished run has come, an empty text for a finished one."""
        return "" if self.complete else f"unfinished: epoch {len(self.epochs)} of {self.planned}"

    @property
    def updates(self) -> tuple[MaskUpdate, ...]:
        return tuple(update for epoch in self.epochs for update in epoch.updates)


def read_run(folder: Path) -> RecordedRun:
    """Read the run in ``folder``."""
    folder = Path(folder)
    config = read_config(folder)
    record = read_summary(folder)
    epochs = read_metrics(folder, finished=record is not None)
    method = config["method"]
    run = RecordedRun(
        folder=folder,
        label=folder.resolve().name,
        dataset=config["dataset"],
        model=config["model"],
        method=method["name"],
        granularity=_granularity(method.get("granularity")),
        seed=config["seed"],
        planned=config["total_epochs"],
        config=config,
        epochs=epochs,
    )
    if record is not None:
        return replace(run, **_summary_fields(record))
    if not epochs:
        return run
    summary = summarise([epoch.top1 for epoch in epochs])
    seconds = sum(epoch.seconds for epoch in epochs)
    return replace(run, summary=summary, sparsity=epochs[-1].sparsity, seconds=seconds)


def read_runs(folders: Sequence[Path]) -> list[RecordedRun]:
    """Read every run once, labelled by the shortest end of its path that tells it from the others."""
    if not folders:
        raise UserError("no run folder given")
    # A folder named twice (overlapping globs) would otherwise count as two runs in the means.
    unique: dict[Path, Path] = {}
    for folder in folders:
        unique.setdefault(Path(folder).resolve(), Path(folder))
    return [replace(read_run(given), label=_shortest(path, list(unique))) for path, given in unique.items()]


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json: the config, the resolved method, ``classes`` and image ``shape``."""
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"{folder} is not a run folder: it has no config.json")
    with naming_file(file):
        config = _loads(file.read_text(encoding="utf-8"))
        kinds = {"dataset": str, "model": str, "seed": int, "total_epochs": int, "classes": int, "shape": list}
        for key, kind in kinds.items():
            _field(config, key, kind)
        method = _field(config, "method", dict)
        _field(method, "name", str), _field(method, "steps", int)
        return config


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Read summary.json; None for a run that is not finished."""
    file = folder / "summary.json"
    if not file.is_file():
        return None
    with naming_file(file):
        summary = _loads(file.read_text(encoding="utf-8"))
        _summary_fields(summary)
        return summary


def read_metrics(folder: Path, finished: bool = False, epochs: int | None = None) -> tuple[EpochMetrics, ...]:
    """Read the first ``epochs`` lines of metrics.jsonl, or all.

    A line cut short by a kill, or being written at this moment, is dropped unless the run is ``finished``.
    """
    file = folder / "metrics.jsonl"
    if not finished and not file.exists():
        return ()
    with naming_file(file):
        lines = file.read_text(encoding="utf-8").split("\n")
    torn = lines.pop()  # what follows the last newline
    if torn and finished:
        lines.append(torn)
    found: list[EpochMetrics] = []
    for number, line in enumerate(lines[:epochs], start=1):
        with naming_file(f"{file} line {number}"):
            found.append(_epoch(_loads(line)))
            if found[-1].epoch != number:
                raise ValueError(f"epoch {found[-1].epoch} stands where epoch {number} should")
    if finished and not found:
        raise UnreadableFile(f"{file} has no epoch in it, yet there is a summary.json; {ANEW}")
    return tuple(found)


def _loads(text: str) -> dict[str, Any]:
    record = json.loads(text)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record


def _field(record: Mapping[str, Any], key: str, kind: type[T]) -> T:
    """Return ``record[key]``, held to its type: whole numbers pass as floats, booleans never pass as numbers."""
    value: Any = record[key]
    if kind is float and type(value) is int:
        value = float(value)
    right = type(value) is kind
    if not right or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"field {key!r} should be {KINDS.get(kind, kind.__name__)}, not {repr(value)[:60]}")
    return cast(T, value)


def _epoch(record: Mapping[str, Any]) -> EpochMetrics:
    return EpochMetrics(
        epoch=_field(record, "epoch", int),
        sparsity=_field(record, "sparsity", float),
        top1=_field(record, "top1", float),
        top1_super=None if record["top1_super"] is None else _field(record, "top1_super", float),
        seconds=_field(record, "seconds", float),
        updates=tuple(_update(update) for update in _field(record, "updates", list)),
        row=record,
    )


def _update(entry: Any) -> MaskUpdate:
    if not isinstance(entry, list) or len(entry) != 3 or any(type(number) is not int for number in entry):
        raise ValueError(f"an entry of 'updates' should be [step, revived, dropped], not {repr(entry)[:60]}")
    return MaskUpdate(*entry)


def _summary_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what summary.json says of a run, by the names of RecordedRun."""
    layers = _field(record, "layers", dict)
    return {
        "complete": _field(record, "complete", bool),
        "summary": Summary(
            last=_field(record, "top1_last", float),
            best=_field(record, "top1_best", float),
            best_epoch=_field(record, "best_epoch", int),
            std=_field(record, "std_last_10pct", float),
        ),
        "sparsity": _field(record, "sparsity", float),
        "seconds": _field(record, "seconds", float),
        "weights": _field(record, "weights", int),
        "kept": _field(record, "kept", int),
        "layers": {name: _layer(_field(layers, name, dict)) for name in layers},
        "environment": {key: str(value) for key, value in _field(record, "environment", dict).items()},
        "notes": tuple(str(note) for note in record.get("notes") or ()),
    }


def _layer(counts: Mapping[str, Any]) -> LayerCount:
    return LayerCount(weights=_field(counts, "weights", int), kept=_field(counts, "kept", int))


def _granularity(given: Any) -> str:
    """Return weight, filter or 2:4, as the command line spells it."""
    if not isinstance(given, dict):
        return "weight"
    if "n" in given and "m" in given:
        return f"{given['n']}:{given['m']}"
    return str(given.get("type", "weight")).lower()


def _shortest(path: Path, among: Sequence[Path]) -> str:
    for length in range(1, len(path.parts) + 1):
        tail = path.parts[-length:]
        if sum(other.parts[-length:] == tail for other in among) == 1:
            return "/".join(tail)
    return str(path)
