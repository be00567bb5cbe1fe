"""Checkpoints: network, masks, step and the optimizer's state in one safetensors file that says which run it is of.

Notes in its header: those of its position, ``step``, ``config`` (the settings of its run), ``metrics`` (SHA-256 of the
metrics up to its epoch) and ``sha256`` of all tensors and the other notes. Those of format 1 have epoch and step alone.
Format 3 is that of a checkpoint within an epoch, which earlier versions cannot resume from. Format 4 is that of a
network trained in parts: the tensors lie in other files, which ``parts`` names (see ``sharded_checkpoint``).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.optim import Optimizer

from dcil.identity import StateError
from dcil.net import SparseNet
from dcil.runs.atomic import write_text
from dcil.runs.damage import ANEW, CONTENT_ERRORS, UnreadableFile, naming_file
from dcil.runs.position import Position
from dcil.runs.tensors import digest, whole, write_tensors

FORMAT, WITHIN_EPOCH, WITHOUT_DIGEST = "dcil checkpoint 2", "dcil checkpoint 3", "dcil checkpoint 1"
IN_PARTS, PARTS = "dcil checkpoint 4", "checkpoint-parts"
NOTES = ("epoch", "step", "config", "metrics", "sha256")
ERRORS = (SafetensorError, RuntimeError, *CONTENT_ERRORS)
#: What an optimizer keeps for a parameter; the step is a number of its own for each.
STEP = "step"
STATE_KEYS = {"SGD": ("momentum_buffer",), "AdamW": (STEP, "exp_avg", "exp_avg_sq")}


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file holds."""

    notes: Mapping[str, str]
    tensors: Mapping[str, Tensor]

    @property
    def position(self) -> Position:
        return Position.from_notes(self.notes)

    def load(
        self, file: Path, net: SparseNet, optimizer: Optimizer | None, config: Mapping[str, Any] | None
    ) -> Position:
        """Load network and optimizer, if they belong to the run with the settings ``config``; return the position."""
        with naming_file(file, f"restore it, or {ANEW}", ERRORS):
            if config is not None and "config" in self.notes:
                check_settings(file, json.loads(self.notes["config"]), config)
            self.load_into(net, optimizer)
            return self.position

    def load_into(self, net: SparseNet, optimizer: Optimizer | None) -> None:
        """Load network and optimizer; ValueError says what does not fit."""
        if strange := [key for key in self.tensors if not key.startswith(("net.", "optimizer."))]:
            raise ValueError(f"tensor {strange[0]!r} belongs to no checkpoint")
        try:
            net.load_state_dict({k.removeprefix("net."): v for k, v in self.tensors.items() if k.startswith("net.")})
        except StateError as error:
            raise ValueError(f"it is of another network: {error}") from None
        self.position.check(int(self.notes["step"]), net.steps_done, net.method.epoch_steps)
        if optimizer is not None:
            self.load_optimizer(optimizer)

    def load_optimizer(self, optimizer: Optimizer) -> None:
        """Load the optimizer's state of every parameter, in the parameter's memory layout."""
        places = places_in(optimizer)
        given = {key for key in self.tensors if key.startswith("optimizer.")}
        if strange := given - places.keys():
            raise ValueError(f"{min(strange)} belongs to another optimizer")
        # The checksum vouches for the rest: a parameter that no gradient has reached yet has no state.
        if self.notes["format"] == WITHOUT_DIGEST and optimizer.defaults.get("momentum") and given != places.keys():
            raise ValueError(f"{min(places.keys() - given)} is missing")
        for name in given:
            value, (parameter, key) = self.tensors[name], places[name]
            shape = torch.Size() if key == STEP else parameter.shape
            if value.shape != shape:
                raise ValueError(f"{name} must have shape {tuple(shape)}, has {tuple(value.shape)}")
            optimizer.state[parameter][key] = placed(value, parameter, optimizer, is_step=key == STEP)


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters of all groups."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def places_in(optimizer: Optimizer) -> dict[str, tuple[Tensor, str]]:
    """Return name -> (parameter, the optimizer's key) of every tensor that the optimizer may keep."""
    keys = STATE_KEYS[type(optimizer).__name__]
    parameters = enumerate(parameters_of(optimizer))
    return {f"optimizer.{i}.{key}": (parameter, key) for i, parameter in parameters for key in keys}


def tensors_of(net: SparseNet, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return all that a run goes on from, by the names of a checkpoint; live tensors."""
    tensors: dict[str, Tensor] = {f"net.{key}": value for key, value in net.state_dict().items()}
    for name, (parameter, key) in places_in(optimizer).items():
        if (value := optimizer.state.get(parameter, {}).get(key)) is not None:
            tensors[name] = value
    return tensors


def placed(value: Tensor, parameter: Tensor, optimizer: Optimizer, is_step: bool) -> Tensor:
    """Return a loaded tensor where the optimizer has it: beside the parameter and laid out as that, a step as a number.

    Torch keeps steps on the CPU unless its kernels read them on the device.
    """
    if is_step:
        on_device = optimizer.defaults["fused"] or optimizer.defaults["capturable"]
        return value.to(parameter.device if on_device else "cpu", copy=True)
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def notes_for(
    net: SparseNet, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], position: Position, form: str
) -> dict[str, str]:
    """Return the notes of a checkpoint at ``position``. ``rows`` are the metrics of its epochs."""
    notes = {"format": form, **position.notes(), "step": str(net.steps_done)}
    return notes | {"config": json.dumps(config), "metrics": metrics_digest(rows)}


def write(
    file: Path,
    net: SparseNet,
    optimizer: Optimizer,
    config: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    position: Position,
) -> None:
    """Write the checkpoint at ``position``."""
    form = WITHIN_EPOCH if position.batch else FORMAT
    publish(file, whole(tensors_of(net, optimizer)), notes_for(net, config, rows, position, form))
    remove_parts(file.parent)


def publish(file: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
    """Write the file of a checkpoint atomically, then checkpoint.json beside it."""
    notes = {**notes, "sha256": digest(tensors, notes)}
    write_tensors(file, tensors, notes)
    write_text(file.with_suffix(".json"), readable(notes))


def readable(notes: Mapping[str, str]) -> str:
    """Return the text of checkpoint.json; the settings are in config.json."""
    shown = {key: value for key, value in notes.items() if key not in ("config", "within", "parts")}
    batch = Position.from_notes(notes).batch
    return json.dumps(shown | ({"batch": str(batch)} if batch else {}), indent=1)


def remove_parts(run: Path, keep: str | None = None) -> None:
    """Remove the parts of checkpoints in a run folder, but for those of step ``keep``."""
    folder = run / PARTS
    for step in folder.iterdir() if folder.is_dir() else ():
        if step.name != keep:
            shutil.rmtree(step, ignore_errors=True)
    if keep is None and folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)


def read(file: Path) -> Checkpoint | None:
    """Read and check a checkpoint; None if there is none."""
    found = read_file(file)
    if found is None or "parts" not in found.notes:
        return found
    from dcil.runs.sharded_checkpoint import read_whole  # importing it takes a second

    with naming_file(file, f"restore it, or {ANEW}", ERRORS):
        return Checkpoint(found.notes, read_whole(file.parent, found.notes))


def read_file(file: Path) -> Checkpoint | None:
    """Read and check a checkpoint file, of one in parts the notes alone; None if there is none."""
    with opened(file) as found:
        if found is None:
            return None
        notes = notes_of(found)
        tensors = {key: found.get_tensor(key) for key in found.keys()}  # noqa: SIM118
        rest = {key: value for key, value in notes.items() if key != "sha256"}
        if notes.get("sha256", said := digest(tensors, rest)) != said:
            raise ValueError("its checksum is wrong")
        return Checkpoint(notes, tensors)


def read_notes(file: Path) -> dict[str, str]:
    """Read the notes of a checkpoint file, none if there is no file; the tensors are not checked."""
    with opened(file) as found:
        return notes_of(found) if found is not None else {}


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Open a checkpoint file; None if there is none."""
    with naming_file(file, f"restore it, or {ANEW}", ERRORS):
        if not os.path.lexists(file):
            yield None
            return
        if file.exists() and not file.is_file():
            raise ValueError("it is no ordinary file")
        with file.open("rb"):  # Python's error says why a file cannot be read, the library's does not
            pass
        with safe_open(file, "pt") as found:
            yield found


def notes_of(found: Any) -> dict[str, str]:
    """Return the notes; refuse a format that this version does not know, and notes that are missing."""
    notes = dict(found.metadata() or {})
    if notes.get("format") not in (FORMAT, WITHIN_EPOCH, WITHOUT_DIGEST, IN_PARTS):
        raise ValueError(f"its format must be {FORMAT!r}, is {notes.get('format')!r}")
    needed = NOTES if notes["format"] != WITHOUT_DIGEST else NOTES[:2]
    needed = (*needed, "parts") if notes["format"] == IN_PARTS else needed
    if missing := [name for name in needed if name not in notes]:
        raise KeyError(missing[0])
    Position.from_notes(notes), int(notes["step"])  # refuses text
    return notes


def check_metrics(file: Path, expected: str | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse metrics in ``file`` whose SHA-256 is not the expected one; runs of earlier versions have none."""
    if expected not in (None, metrics_digest(rows)):
        raise UnreadableFile(f"{file} must hold the metrics of its run, holds others; restore it, or {ANEW}")


def metrics_digest(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the SHA-256 of metrics, as their file has them."""
    return hashlib.sha256("".join(json.dumps(row) + "\n" for row in rows).encode()).hexdigest()


def check_settings(file: Path, there: Mapping[str, Any], expected: Mapping[str, Any], within: str = "") -> None:
    """Refuse ``file`` if one of the settings in it differs from the expected one; later versions may add settings."""
    for name in [name for name in expected if name in there]:
        if isinstance(there[name], dict) and isinstance(expected[name], dict):
            check_settings(file, there[name], expected[name], f"{within}{name}.")
        elif there[name] != expected[name]:
            raise UnreadableFile(
                f"{file} must have the settings of its run, has {within}{name} {there[name]!r} where "
                f"{expected[name]!r} belongs; restore it, or {ANEW}"
            )
