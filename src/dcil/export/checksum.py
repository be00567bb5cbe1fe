"""Write and check the SHA-256 of a safetensors file's tensors and notes."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dcil.errors import UserError


def save_checked(parts: dict[str, Tensor], file: Path, notes: dict[str, str]) -> None:
    notes = {key: value for key, value in notes.items() if key != "sha256"}
    file.write_bytes(save(parts, {**notes, "sha256": digest(parts, notes)}))


def open_checked(file: Path, form: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and notes of a file whose note "format" is ``form``, and check them.

    The safetensors library holds every offset against the file's size before it allocates.
    """
    with safe_open(file, "pt") as opened:
        notes: dict[str, str] = dict(opened.metadata() or {})
        if notes.get("format") != form:
            raise UserError(f"its format is {notes.get('format')!r}, not {form!r}")
        parts: dict[str, Tensor] = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    if notes.pop("sha256", None) != digest(parts, notes):
        raise UserError("its checksum is wrong")
    return parts, notes


def digest(parts: Mapping[str, Tensor], notes: Mapping[str, str]) -> str:
    found = hashlib.sha256(json.dumps(sorted(notes.items())).encode())
    for key in sorted(parts):
        part = parts[key]
        found.update(f"{key} {part.dtype} {tuple(part.shape)}".encode())
        found.update(part.flatten().view(torch.uint8).numpy().data if part.numel() else b"")
    return found.hexdigest()


@contextmanager
def refusing(file: Path | str) -> Iterator[None]:
    """Turn every error that a damaged or hostile file causes into a UserError of one sentence."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{file} is refused: {error}") from None
    except FileNotFoundError:
        raise UserError(f"{file} does not exist") from None
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, RuntimeError, MemoryError, zlib.error) as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        raise UserError(f"{file} is refused: it is damaged or of another format ({reason})") from None
