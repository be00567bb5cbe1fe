"""Write the numbers of metrics.jsonl as TensorBoard events, while a run is going."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dcil.errors import missing_extra, unknown
from dcil.runs.progress import Progress

#: Names of --log.
LOGS = ("tensorboard",)


def check_log(name: str | None) -> None:
    """Refuse a log that is unknown or whose package is not installed."""
    if name is None:
        return
    if name not in LOGS:
        raise unknown("log", name, LOGS)
    _writer_class()


@contextmanager
def event_log(folder: Path, progress: Progress) -> Iterator[Progress]:
    """Yield a progress callback that calls ``progress`` and writes every epoch's numbers to ``folder``/tensorboard.

    A run that resumes reports its earlier epochs anew, so the events are a copy of its metrics.jsonl, written from the
    start: no epoch is missing or there twice.
    """
    writer: Any = None

    def report(epoch: int, part: float, row: dict[str, Any] | None) -> None:
        nonlocal writer
        if row is not None:
            if writer is None:  # not before: the run has its folder for itself only now
                writer = _open(folder / "tensorboard")
            for name, value in numbers(row).items():
                writer.add_scalar(name, value, row["epoch"])
            writer.flush()
        progress(epoch, part, row)

    try:
        yield report
    finally:
        if writer is not None:
            writer.close()


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of an epoch's metrics; of its mask updates, how many weights they revived and dropped."""
    found = {name: float(value) for name, value in row.items() if type(value) in (int, float) and name != "epoch"}
    for index, name in ((1, "revived"), (2, "dropped")):
        found[f"updates/{name}"] = float(sum(update[index] for update in row["updates"]))
    return found


def _open(folder: Path) -> Any:
    writer = _writer_class()
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    return writer(str(folder))


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise missing_extra("tensorboard", "tensorboard") from None
    return SummaryWriter
