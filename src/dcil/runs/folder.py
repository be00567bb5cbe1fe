"""Write and read a run folder. A kill at any moment leaves it resumable.

config.json               the resolved configuration
metrics.jsonl             one object per epoch
checkpoint.safetensors    weights, private layers, masks, step, optimizer state; their checksum and the run's settings
checkpoint.json           its position, step and checksum as a readable file
checkpoint-parts/         the tensors of the checkpoint, where each process has its part of them
model.safetensors         the finalized pruned net under the user's own keys
summary.json              the result; its presence marks the run as complete
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch.optim import Optimizer

from dcil.errors import UserError
from dcil.net import SparseNet
from dcil.runs import checkpoint
from dcil.runs.atomic import CannotWrite, drafts, is_abandoned, sync_folder, write_text
from dcil.runs.damage import ANEW, UnreadableFile
from dcil.runs.file_lock import exclusive
from dcil.runs.outputs import check_run_files, is_run_file
from dcil.runs.position import START, Position
from dcil.runs.read import read_config, read_metrics, read_summary
from dcil.runs.seal import sealed


class Checkpoints(Protocol):
    """Writes and reads the checkpoints of a run."""

    def save(
        self,
        net: SparseNet,
        optimizer: Optimizer,
        config: Mapping[str, Any],
        rows: Sequence[Mapping[str, Any]],
        position: Position,
    ) -> None: ...

    def wait(self) -> None: ...

    def restore(self, net: SparseNet, optimizer: Optimizer, config: Mapping[str, Any]) -> Position: ...


@dataclass(frozen=True)
class RunFolder:
    """The files of one run below ``path``."""

    path: Path

    @property
    def started(self) -> bool:
        """Whether a run was begun here."""
        return (self.path / "config.json").exists()

    def summary(self) -> dict[str, Any] | None:
        """Return the summary of a complete run, else None."""
        return read_summary(self.path)

    def begin(self, config: str, resume: bool = True) -> None:
        """Write config.json, whose text is ``config``: the run begins. One that is here must be the same run."""
        expected = json.loads(config)
        if self.started:
            if not resume:
                raise UserError(f"{self.path} holds a run already: --resume continues it, or choose another --out")
            checkpoint.check_settings(self.path / "config.json", self.record(), expected)
            return
        if strange := sorted(
            file.name for file in self.path.iterdir() if is_run_file(file.name) and file.name[0] != "."
        ):
            raise UserError(f"{self.path} has {strange[0]} and no config.json; restore that, or choose another --out")
        write_text(self.path / "config.json", json.dumps(sealed(expected), indent=1))

    def withdraw(self) -> None:
        """Undo ``begin``: the run's settings were wrong, and no epoch was recorded."""
        for name in ("metrics.jsonl", "config.json"):
            (self.path / name).unlink(missing_ok=True)

    def record(self) -> dict[str, Any]:
        """Return config.json as it is: the config, the resolved method, ``classes``, ``shape``, and a text's record."""
        return read_config(self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder while open; two processes in one folder would write into each other's files.

        A folder that is made here and left empty is removed again.
        """
        check_run_files(self.path, Path(os.path.realpath(self.path)))
        made = not self.path.exists()
        busy = f"one process at a time may train in {self.path}; wait for the other or choose another --out"
        try:
            with exclusive(self.path / ".lock", busy):
                yield
        finally:
            if made:
                with suppress(OSError):  # it is not empty
                    self.path.rmdir()

    def leftovers(self) -> list[Path]:
        """Return what a kill has left: drafts of the run's files or of processes that have ended, and old locks."""
        found = [file for file, name in drafts(self.path) if is_run_file(name) or is_abandoned(file)]
        return [*found, *self.path.glob(".tmp??????"), *self.path.glob(".lock")]  # .tmp: of safetensors' save_file

    def tidy(self) -> None:
        """Remove what a kill has left, and write checkpoint.json anew if it is that of an earlier checkpoint."""
        for file in self.leftovers():
            if file.name != ".lock":  # the one that is held
                file.unlink(missing_ok=True)
        notes, file = checkpoint.read_notes(self.path / "checkpoint.safetensors"), self.path / "checkpoint.json"
        if notes and not (file.is_file() and file.read_bytes() == checkpoint.readable(notes).encode()):
            write_text(file, checkpoint.readable(notes))
        checkpoint.remove_parts(self.path, keep=notes["step"] if "parts" in notes else None)

    # -- metrics: written before the checkpoint of the same epoch, so none is ever missing ---------------------------

    def metrics(self, epochs: int | None = None) -> list[dict[str, Any]]:
        """Return the first ``epochs`` lines, or all whole ones; a line that a kill cut short is not one."""
        rows = [dict(epoch.row) for epoch in read_metrics(self.path, epochs=epochs)]
        if epochs is not None and len(rows) != epochs:
            file = self.path / "metrics.jsonl"
            raise UserError(f"{file} must hold the {epochs} epochs of the checkpoint, has {len(rows)}; {ANEW}")
        return rows

    def append(self, row: dict[str, Any]) -> None:
        """Append the metrics of one epoch and wait until they are on disk; half a line is taken back."""
        file = self.path / "metrics.jsonl"
        try:
            with file.open("ab", buffering=0) as opened:
                end = opened.tell()
                try:
                    line = (json.dumps(row) + "\n").encode()
                    while line:  # an almost full disk takes a part of it
                        line = line[opened.write(line) :]
                    os.fsync(opened.fileno())
                except OSError:
                    opened.truncate(end)
                    raise
            sync_folder(self.path)
        except OSError as error:
            raise CannotWrite.at(file, error) from None

    def rewind_metrics(self, epochs: int) -> None:
        """Drop the lines after the first ``epochs``: those of epochs that the checkpoint does not have."""
        file, rows = self.path / "metrics.jsonl", self.metrics(epochs)
        if epochs:
            notes = checkpoint.read_notes(self.path / "checkpoint.safetensors")
            checkpoint.check_metrics(file, notes.get("metrics"), rows)
        write_text(file, "".join(json.dumps(row) + "\n" for row in rows))

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Called where a checkpoint must be on disk, as it is when ``save`` returns."""

    @property
    def has_checkpoint(self) -> bool:
        return os.path.lexists(self.path / "checkpoint.safetensors")

    def save(
        self,
        net: SparseNet,
        optimizer: Optimizer,
        config: Mapping[str, Any],
        rows: Sequence[Mapping[str, Any]],
        position: Position,
    ) -> None:
        """Write the checkpoint at ``position``, after the epochs with the metrics ``rows``: all that a run resumes
        from."""
        checkpoint.write(self.path / "checkpoint.safetensors", net, optimizer, config, rows, position)

    def restore(
        self,
        net: SparseNet,
        optimizer: Optimizer | None = None,
        config: Mapping[str, Any] | None = None,
        file: Path | None = None,
    ) -> Position:
        """Load the checkpoint of the run with the settings ``config``, or the one in ``file``, into ``net`` and
        ``optimizer``; return its position, the beginning if there is none."""
        place = file or self.path / "checkpoint.safetensors"
        found = checkpoint.read(place)
        if found is None:
            if file is not None or (self.path / "checkpoint.json").exists():
                raise UnreadableFile(f"{place} is missing; restore it, or {ANEW}")
            return START
        return found.load(place, net, optimizer, config)


class ReadOnlyRunFolder(RunFolder):
    """The run folder as ranks other than 0 see it: they read the checkpoint and write nothing."""

    def begin(self, config: str, resume: bool = True) -> None: ...

    def withdraw(self) -> None: ...

    @contextmanager
    def locked(self) -> Iterator[None]:
        yield

    def tidy(self) -> None: ...

    def metrics(self, epochs: int | None = None) -> list[dict[str, Any]]:
        return []  # rank 0 may be writing them at this moment

    def append(self, row: dict[str, Any]) -> None: ...

    def rewind_metrics(self, epochs: int) -> None: ...

    def save(
        self,
        net: SparseNet,
        optimizer: Optimizer,
        config: Mapping[str, Any],
        rows: Sequence[Mapping[str, Any]],
        position: Position,
    ) -> None: ...
