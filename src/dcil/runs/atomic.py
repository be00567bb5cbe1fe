"""Files that are either whole or not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from dcil.errors import UserError


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """``write`` fills a neighbour of ``path``, which then takes its place in one step."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.chmod(0o666 & ~current_umask())  # some writers make files that only the owner can read
        draft.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        if path.parent.is_dir():
            draft.unlink(missing_ok=True)


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda draft: draft.write_text(text, encoding="utf-8"))
