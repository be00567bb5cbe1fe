"""Watch runs: rebuild their report while they are going."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dcil import report
from dcil.runs.read import RecordedRun, read_runs

FILES = ("config.json", "metrics.jsonl", "summary.json")
#: Of every file of every run: when it was written, and its size.
State = list[tuple[int, int] | None]


def watch(
    folders: Sequence[Path], out: Path, seconds: int, sleep: Callable[[float], None] = time.sleep
) -> list[RecordedRun]:
    """Rebuild the report at ``out`` whenever a run has something new, until all are complete; return the runs.

    Folders that do not exist or hold no run yet are waited for. While it is watched, the page makes browsers load it
    anew every ``seconds``; whatever ends the watch, an interrupt too, leaves a page that does not.
    """
    seen: State | None = None
    runs: list[RecordedRun] = []
    waiting: list[Path] = []
    try:
        while True:
            if (now := state(folders)) != seen:
                runs, waiting = read(folders)
                if not waiting and all(run.complete for run in runs):
                    return runs
                report.write(runs, out, waiting, refresh=seconds)
                seen = now
                gc.collect()  # figures are cyclic garbage, and short commands run without automatic collection
            sleep(seconds)
    finally:
        if runs or waiting:
            report.write(runs, out, waiting)


def read(folders: Sequence[Path]) -> tuple[list[RecordedRun], list[Path]]:
    """Return the runs that have begun, and the folders of those that have not."""
    begun = [folder for folder in folders if (folder / "config.json").exists()]
    return read_runs(begun) if begun else [], [folder for folder in folders if folder not in begun]


def state(folders: Sequence[Path]) -> State:
    """Return what changes when a run has something new."""
    return [_stamp(folder / name) for folder in folders for name in FILES]


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
