"""Read and check the files of a run folder: config.json, metrics.jsonl and summary.json.

``read_config``, ``read_metrics`` and ``read_summary`` return the contents as they are; ``read_run`` puts them together
as a ``RecordedRun``. Whatever is wrong with a file is a UserError in one line that names it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dcil.errors import UserError
from dcil.runs import checkpoint
from dcil.runs.damage import ANEW, UnreadableFile, naming_file
from dcil.runs.json_file import parse_object, read_text
from dcil.runs.printable import printable, quoted
from dcil.runs.run_fields import CONFIG, EPOCH, SUMMARY, TO_SUMMARISE
from dcil.runs.seal import unsealed
from dcil.runs.summary import Summary, summarise, summarise_loss


@dataclass(frozen=True)
class MaskUpdate:
    """One mask update: its step, the weights it revived and the weights it dropped."""

    step: int
    revived: int
    dropped: int


@dataclass(frozen=True)
class EpochMetrics:
    """One line of metrics.jsonl: accuracies in percent, losses in nats, None where none was measured.

    ``row`` is the whole line.
    """

    epoch: int
    sparsity: float
    top1: float | None
    top1_super: float | None
    val_loss: float | None
    val_loss_super: float | None
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
    loss: Summary | None = None
    sparsity: float | None = None
    seconds: float = 0.0
    weights: int | None = None
    kept: int | None = None
    layers: Mapping[str, LayerCount] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    cost: Mapping[str, int] = field(default_factory=dict)  # empty for summaries of version 0.1

    @property
    def dense(self) -> bool:
        return self.method.lower() == "dense"

    @property
    def text(self) -> Mapping[str, Any] | None:
        """What config.json says about the text that the run was trained on; None for images."""
        found: Mapping[str, Any] | None = self.config.get("text")
        return found

    @property
    def task(self) -> tuple[str, str, str]:
        """What the accuracies and losses of runs must share to be compared: network, data set, text."""
        return self.model, self.dataset, str(self.text["sha256"]) if self.text else ""

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
    notes = {} if record else checkpoint.read_notes(folder / "checkpoint.safetensors")  # first: metrics are added to
    epochs = read_metrics(folder, finished=record is not None)
    expected = record.get("metrics_sha256") if record else notes.get("metrics")
    rows = [epoch.row for epoch in epochs][: int(notes["epoch"]) if notes else None]
    checkpoint.check_metrics(folder / "metrics.jsonl", expected, rows)
    method = config["method"]
    run = RecordedRun(
        folder=folder,
        label=printable(folder.resolve().name),
        dataset=printable(config["text"]["file"])
        if config["dataset"] == "text" and "text" in config
        else config["dataset"],
        model=config["model"],
        method=method["name"],
        granularity=_granularity(method.get("granularity")),
        seed=config["seed"],
        planned=config["total_epochs"],
        config=config,
        epochs=epochs,
        loss=summarise_loss([epoch.val_loss for epoch in epochs], [epoch.sparsity for epoch in epochs]),
    )
    if record is not None:
        return replace(run, **_summary_fields(record))
    if not epochs:
        return run
    top1 = [epoch.top1 for epoch in epochs]
    summary = summarise(top1) if any(value is not None for value in top1) else None
    seconds = sum(epoch.seconds for epoch in epochs)
    return replace(run, summary=summary, sparsity=epochs[-1].sparsity, seconds=seconds)


def read_runs(folders: Sequence[Path]) -> list[RecordedRun]:
    """Read every run once, labelled by the shortest end of its path that tells it from the others."""
    if not folders:
        raise UserError("no run folder given")
    # A folder named twice (overlapping globs) would otherwise count as two runs in the means.
    unique: dict[Path, Path] = {}
    for folder in folders:
        unique.setdefault(Path(os.path.realpath(folder)), Path(folder))  # resolve() fails on links in a circle
    return [replace(read_run(given), label=printable(_shortest(path, list(unique)))) for path, given in unique.items()]


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json: the config, the resolved method, ``classes``, ``shape`` of an input and, of a text, which."""
    file = folder / "config.json"
    if not os.path.lexists(file):
        raise UserError(f"{folder} is not a run folder: it has no config.json")
    with naming_file(file):
        config = parse_object(read_text(file))
        CONFIG(config, "")
        config = unsealed(config)
        return config


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Read summary.json; None for a run that is not finished."""
    file = folder / "summary.json"
    if not os.path.lexists(file):
        return None
    with naming_file(file, f"remove it, and dcil train --resume --out {quoted(folder)} writes it again"):
        summary = parse_object(read_text(file))
        SUMMARY(summary, "")
        summary = unsealed(summary)
        for name, counts in [("", summary), *summary["layers"].items()]:
            if counts["kept"] > counts["weights"]:
                raise ValueError(f"{name or 'the network'} keeps {counts['kept']} of {counts['weights']} weights")
        return summary


def read_metrics(folder: Path, finished: bool = False, epochs: int | None = None) -> tuple[EpochMetrics, ...]:
    """Read all lines of metrics.jsonl, or the first ``epochs`` of a run that goes on from them.

    A line cut short by a kill, or being written at this moment, is dropped unless the run is ``finished``.
    """
    file = folder / "metrics.jsonl"
    if not finished and not os.path.lexists(file):
        return ()
    with naming_file(file):
        lines = read_text(file).split("\n")
    torn = lines.pop()  # what follows the last newline
    if torn and finished:
        lines.append(torn)
    found: list[EpochMetrics] = []
    for line_number, line in enumerate(lines[:epochs], start=1):
        with naming_file(f"{file} line {line_number}"):
            found.append(_epoch(parse_object(line)))
            if epochs is not None:
                TO_SUMMARISE(found[-1].row, "")
            if found[-1].epoch != line_number:
                raise ValueError(f"epoch {found[-1].epoch} stands where epoch {line_number} should")
    if finished and not found:
        raise UnreadableFile(f"{file} has no epoch in it, yet there is a summary.json; {ANEW}")
    return tuple(found)


def _epoch(row: dict[str, Any]) -> EpochMetrics:
    EPOCH(row, "")
    return EpochMetrics(
        epoch=row["epoch"],
        sparsity=float(row["sparsity"]),
        top1=_measured(row["top1"]),
        top1_super=_measured(row["top1_super"]),
        val_loss=_measured(row.get("val_loss")),
        val_loss_super=_measured(row.get("val_loss_super")),
        seconds=float(row["seconds"]),
        updates=tuple(MaskUpdate(*update) for update in row["updates"]),
        row=row,
    )


def _measured(value: float | None) -> float | None:
    return None if value is None else float(value)


def _summary_fields(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return what summary.json says of a run, by the names of RecordedRun."""
    return {
        "complete": summary["complete"],
        "summary": Summary(
            last=float(summary["top1_last"]),
            best=float(summary["top1_best"]),
            best_epoch=summary["best_epoch"],
            std=float(summary["std_last_10pct"]),
        ),
        "sparsity": float(summary["sparsity"]),
        "seconds": float(summary["seconds"]),
        "weights": summary["weights"],
        "kept": summary["kept"],
        "layers": {name: LayerCount(counts["weights"], counts["kept"]) for name, counts in summary["layers"].items()},
        "environment": summary["environment"],
        "notes": tuple(summary.get("notes") or ()),
        "cost": summary.get("cost", {}),
    }


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
