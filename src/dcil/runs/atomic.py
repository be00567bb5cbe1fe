"""Atomic file writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from dcil.errors import UserError


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` with a draft beside ``path``, then rename the draft: readers see all of it or nothing."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.chmod(0o666 & ~current_umask())  # some writers make files that only the owner can read
        os.replace(draft, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if path.parent.is_dir():
            draft.unlink(missing_ok=True)


def current_umask() -> int:
    """Return the permissions that new files are made without; the only way to read them is to set them."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically."""
    write_atomically(path, lambda draft: draft.write_text(text, encoding="utf-8"))
