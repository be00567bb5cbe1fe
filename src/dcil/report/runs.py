"""A run folder, read and checked: what every table and figure starts from. Standard library only."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from dcil.errors import UserError
from dcil.runs.damage import naming_file
from dcil.runs.summary import Summary, summarise

T = TypeVar("T")
KINDS = {str: "a string", int: "a whole number", float: "a finite number", dict: "an object", list: "a list"}


@dataclass(frozen=True)
class Update:
    """One mask update: how many weights came back and how many went."""

    step: int
    revived: int
    dropped: int


@dataclass(frozen=True)
class Epoch:
    """One line of `metrics.jsonl`, as far as a report needs it; accuracies in percent."""

    epoch: int
    sparsity: float
    top1: float
    top1_super: float | None
    seconds: float
    updates: tuple[Update, ...]


@dataclass(frozen=True)
class Layer:
    """One prunable parameter: how many weights it has and how many were kept."""

    weights: int
    kept: int

    @property
    def sparsity(self) -> float:
        return 1 - self.kept / self.weights if self.weights else 0.0


@dataclass(frozen=True)
class Run:
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
    epochs: tuple[Epoch, ...]
    complete: bool = False
    summary: Summary | None = None
    sparsity: float | None = None
    seconds: float = 0.0
    weights: int | None = None
    kept: int | None = None
    layers: Mapping[str, Layer] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def dense(self) -> bool:
        return self.method.lower() == "dense"

    @property
    def status(self) -> str:
        """Empty for a finished run, else how far it has come."""
        return "" if self.complete else f"unfinished: epoch {len(self.epochs)} of {self.planned}"

    @property
    def updates(self) -> tuple[Update, ...]:
        return tuple(update for epoch in self.epochs for update in epoch.updates)


def read(folder: Path) -> Run:
    """The run in `folder`; UserError, in one line that names the file, if it holds none or a damaged one."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a run folder: it has no config.json")
    finished = (folder / "summary.json").is_file()
    config = _object(folder / "config.json")
    epochs = _read_metrics(folder / "metrics.jsonl", finished)
    with naming_file(folder / "config.json"):
        run = _from_config(folder, config, epochs)
    if not finished:
        return _from_metrics(run)
    summary = _object(folder / "summary.json")
    with naming_file(folder / "summary.json"):
        return _from_summary(run, summary)


def read_all(folders: Sequence[Path]) -> list[Run]:
    """Every run once, labelled by the shortest end of its path that tells it from the others."""
    if not folders:
        raise UserError("no run folder given")
    # A folder named twice (overlapping globs) would otherwise count as two runs in the means.
    unique: dict[Path, Path] = {}
    for folder in folders:
        unique.setdefault(Path(folder).resolve(), Path(folder))
    return [replace(read(given), label=_shortest(path, list(unique))) for path, given in unique.items()]


def _shortest(path: Path, among: Sequence[Path]) -> str:
    for length in range(1, len(path.parts) + 1):
        tail = path.parts[-length:]
        if sum(other.parts[-length:] == tail for other in among) == 1:
            return "/".join(tail)
    return str(path)


def _field(record: Mapping[str, Any], key: str, kind: type[T]) -> T:
    """`record[key]`, held to its type: whole numbers pass as floats, booleans never pass as numbers."""
    value: Any = record[key]
    if kind is float and type(value) is int:
        value = float(value)
    right = type(value) is kind
    if not right or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"field {key!r} should be {KINDS.get(kind, kind.__name__)}, not {repr(value)[:60]}")
    return cast(T, value)


def _loads(text: str) -> dict[str, Any]:
    record = json.loads(text)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record


def _object(file: Path) -> dict[str, Any]:
    with naming_file(file):
        return _loads(file.read_text(encoding="utf-8"))


def _read_metrics(file: Path, finished: bool) -> tuple[Epoch, ...]:
    if not finished and not file.exists():
        return ()
    with naming_file(file):
        lines = file.read_text(encoding="utf-8").split("\n")
    torn = lines.pop()  # what follows the last newline: nothing, or a line that is being written at this moment
    if torn and finished:
        lines.append(torn)
    epochs: list[Epoch] = []
    for number, line in enumerate(lines, start=1):
        with naming_file(f"{file} line {number}"):
            epochs.append(_epoch(_loads(line)))
            if epochs[-1].epoch != number:
                raise ValueError(f"epoch {epochs[-1].epoch} stands where epoch {number} should")
    if finished and not epochs:
        raise UserError(f"{file}: no epoch in it, yet there is a summary.json")
    return tuple(epochs)


def _epoch(record: Mapping[str, Any]) -> Epoch:
    return Epoch(
        epoch=_field(record, "epoch", int),
        sparsity=_field(record, "sparsity", float),
        top1=_field(record, "top1", float),
        top1_super=None if record["top1_super"] is None else _field(record, "top1_super", float),
        seconds=_field(record, "seconds", float),
        updates=tuple(_update(update) for update in _field(record, "updates", list)),
    )


def _update(entry: Any) -> Update:
    if not isinstance(entry, list) or len(entry) != 3 or any(type(number) is not int for number in entry):
        raise ValueError(f"an entry of 'updates' should be [step, revived, dropped], not {repr(entry)[:60]}")
    return Update(*entry)


def _from_config(folder: Path, config: dict[str, Any], epochs: tuple[Epoch, ...]) -> Run:
    method = _field(config, "method", dict)
    return Run(
        folder=folder,
        label=folder.resolve().name,
        dataset=_field(config, "dataset", str),
        model=_field(config, "model", str),
        method=_field(method, "name", str),
        granularity=_granularity(method.get("granularity")),
        seed=_field(config, "seed", int),
        planned=_field(config, "total_epochs", int),
        config=config,
        epochs=epochs,
    )


def _granularity(given: Any) -> str:
    """`weight`, `filter`, `2:4`: as the command line spells it."""
    if not isinstance(given, dict):
        return "weight"
    if "n" in given and "m" in given:
        return f"{given['n']}:{given['m']}"
    return str(given.get("type", "weight")).lower()


def _from_metrics(run: Run) -> Run:
    if not run.epochs:
        return run
    summary = summarise([epoch.top1 for epoch in run.epochs])
    seconds = sum(epoch.seconds for epoch in run.epochs)
    return replace(run, summary=summary, sparsity=run.epochs[-1].sparsity, seconds=seconds)


def _from_summary(run: Run, record: Mapping[str, Any]) -> Run:
    layers = _field(record, "layers", dict)
    summary = Summary(
        last=_field(record, "top1_last", float),
        best=_field(record, "top1_best", float),
        best_epoch=_field(record, "best_epoch", int),
        std=_field(record, "std_last_10pct", float),
    )
    return replace(
        run,
        complete=_field(record, "complete", bool),
        summary=summary,
        sparsity=_field(record, "sparsity", float),
        seconds=_field(record, "seconds", float),
        weights=_field(record, "weights", int),
        kept=_field(record, "kept", int),
        layers={name: _layer(name, layers) for name in layers},
        environment={key: str(value) for key, value in _field(record, "environment", dict).items()},
        notes=tuple(str(note) for note in record.get("notes") or ()),
    )


def _layer(name: str, layers: Mapping[str, Any]) -> Layer:
    counts = _field(layers, name, dict)
    return Layer(weights=_field(counts, "weights", int), kept=_field(counts, "kept", int))
