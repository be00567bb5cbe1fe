"""Write and read a run folder. A kill at any moment leaves it resumable.

config.json               the resolved configuration
metrics.jsonl             one object per epoch
checkpoint.safetensors    weights, private layers, masks, step and momentum; its header holds checkpoint.json
checkpoint.json           the same header as a readable file
model.safetensors         the finalized pruned net under the user's own keys
summary.json              the result; its presence marks the run as complete
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from dcil.errors import UserError
from dcil.net import SparseNet
from dcil.runs.atomic import write_atomically, write_text
from dcil.runs.damage import ANEW, CONTENT_ERRORS, naming_file
from dcil.runs.read import read_config, read_metrics, read_summary


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

    def create(self, config: str) -> None:
        """Write config.json, whose text is ``config``: the run begins."""
        write_text(self.path / "config.json", config)

    def record(self) -> dict[str, Any]:
        """Return config.json as it is: the config, the resolved method, ``classes`` and image ``shape``."""
        return read_config(self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder while open; two processes in one folder would write into each other's files."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(
                    f"one process at a time may train in {self.path}; wait for the other or choose another --out"
                ) from None
            yield
            (self.path / ".lock").unlink(missing_ok=True)

    def tidy(self) -> None:
        """Remove the drafts of interrupted writes."""
        for draft in self.path.glob(".*.part"):
            draft.unlink(missing_ok=True)

    # -- metrics: written before the checkpoint of the same epoch, so none is ever missing ---------------------------

    def metrics(self, epochs: int | None = None) -> list[dict[str, Any]]:
        """Return the first ``epochs`` lines, or all whole ones; a line that a kill cut short is not one."""
        rows = [dict(epoch.row) for epoch in read_metrics(self.path, epochs=epochs)]
        if epochs is not None and len(rows) != epochs:
            file = self.path / "metrics.jsonl"
            raise UserError(f"{file} must hold the {epochs} epochs of the checkpoint, has {len(rows)}; {ANEW}")
        return rows

    def append(self, row: dict[str, Any]) -> None:
        """Append the metrics of one epoch and wait until they are on disk."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def rewind_metrics(self, epochs: int) -> None:
        """Drop the lines after the first ``epochs``: those of epochs that the checkpoint does not have."""
        rows = self.metrics(epochs)
        write_text(self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, net: SparseNet, optimizer: Optimizer, epoch: int) -> None:
        """Write the checkpoint after ``epoch`` epochs: all that training resumes from, replaced atomically."""
        tensors = {f"net.{key}": value for key, value in net.state_dict().items()}
        for index, parameter in enumerate(optimizer.param_groups[0]["params"]):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{index}.{key}"] = value
        header = {"epoch": str(epoch), "step": str(net.steps_done), "format": "dcil checkpoint 1"}
        # Clones, because tied weights share memory, which the format does not allow.
        whole = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
        write_atomically(self.path / "checkpoint.safetensors", lambda draft: save_file(whole, draft, header))
        write_text(self.path / "checkpoint.json", json.dumps(header, indent=1))

    def restore(self, net: SparseNet, optimizer: Optimizer | None = None, file: Path | None = None) -> int:
        """Load the checkpoint, or the one in ``file``, into ``net`` and ``optimizer``; return its epochs, 0 if there
        is none."""
        file = file or self.path / "checkpoint.safetensors"
        if not file.exists():
            return 0
        errors = (SafetensorError, RuntimeError, *CONTENT_ERRORS)
        with naming_file(file, errors=errors, problem="is damaged or of another network"):
            with safe_open(file, "pt") as opened:
                header = opened.metadata()
                tensors: dict[str, Tensor] = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            net.load_state_dict({k[4:]: v for k, v in tensors.items() if k.startswith("net.")})
            epoch = int(header["epoch"])
        if optimizer is not None:
            restore_optimizer(optimizer, tensors)
        return epoch


class ReadOnlyRunFolder(RunFolder):
    """The run folder as ranks other than 0 see it: they read the checkpoint and write nothing."""

    def create(self, config: str) -> None: ...

    @contextmanager
    def locked(self) -> Iterator[None]:
        yield

    def tidy(self) -> None: ...

    def metrics(self, epochs: int | None = None) -> list[dict[str, Any]]:
        return []  # rank 0 may be writing them at this moment

    def append(self, row: dict[str, Any]) -> None: ...

    def rewind_metrics(self, epochs: int) -> None: ...

    def save(self, net: SparseNet, optimizer: Optimizer, epoch: int) -> None: ...


def restore_optimizer(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Load the saved state of every parameter, in the parameter's memory layout."""
    for index, parameter in enumerate(optimizer.param_groups[0]["params"]):
        prefix = f"optimizer.{index}."
        for key in [k for k in tensors if k.startswith(prefix)]:
            value = tensors[key]
            if value.shape == parameter.shape:
                value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
            optimizer.state[parameter][key.removeprefix(prefix)] = value
