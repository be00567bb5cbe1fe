"""Write and check the SHA-256 of a safetensors file's tensors and notes."""

from __future__ import annotations

import zlib
from contextlib import AbstractContextManager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dcil.errors import UserError
from dcil.runs.damage import naming_file
from dcil.runs.tensors import digest


def save_checked(parts: dict[str, Tensor], file: Path, notes: dict[str, str]) -> None:
    """Write the tensors and notes with their checksum."""
    notes = {key: value for key, value in notes.items() if key != "sha256"}
    file.write_bytes(save(parts, {**notes, "sha256": digest(parts, notes)}))


def open_checked(file: Path, form: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and notes of a file whose note "format" is ``form``; refuse one that was changed.

    The safetensors library checks every offset against the file's size before it allocates.
    """
    with safe_open(file, "pt") as opened:
        notes: dict[str, str] = dict(opened.metadata() or {})
        if notes.get("format") != form:
            raise UserError(f"its format is {notes.get('format')!r}, not {form!r}")
        parts: dict[str, Tensor] = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    if notes.pop("sha256", None) != digest(parts, notes):
        raise UserError("its checksum is wrong")
    return parts, notes


def naming(file: Path | str) -> AbstractContextManager[None]:
    """Turn whatever a damaged or hostile file raises while it is read into one line that names it."""
    errors = (SafetensorError, ValueError, TypeError, KeyError, RuntimeError, MemoryError, zlib.error)
    return naming_file(file, "export it again", errors, "is refused: damaged or of another format")
