"""Atomic file writes."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dcil.errors import UserError

#: A draft's name: that of its file, and the process that writes it.
DRAFT = re.compile(r"\.(?P<name>.+)\.(?P<process>\d+)\.part", re.DOTALL)


class CannotWrite(UserError):
    """A file cannot be written: a full disk, a lost permission, a broken device."""

    @classmethod
    def at(cls, path: Path, error: OSError) -> CannotWrite:
        return cls(f"cannot write {path}: {error.strerror or error}")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` with a draft beside ``path``, then rename the draft: readers see all of it or nothing.

    When this returns, file and name are on disk. For a path that a user has given: ``outputs.write_output``.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for old, name in drafts(path.parent):
            if name == path.name and is_abandoned(old):
                old.unlink(missing_ok=True)
        write(draft)
        sync_file(draft)
        draft.chmod(0o666 & ~current_umask())  # some writers make files that only the owner can read
        os.replace(draft, path)
        sync_folder(path.parent)
    except OSError as error:
        raise CannotWrite.at(path, error) from None
    finally:
        with suppress(OSError):
            draft.unlink()


def sync_file(file: Path) -> None:
    """Wait until the contents of ``file`` are on disk."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on disk: without it, a power cut may undo a rename."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot do it for folders
            raise
    finally:
        os.close(opened)


def drafts(folder: Path) -> list[tuple[Path, str]]:
    """Return the drafts in ``folder``, each with the name of its file."""
    found = [(file, DRAFT.fullmatch(file.name)) for file in folder.glob(".*.part")]
    return [(file, match["name"]) for file, match in found if match]


def is_abandoned(draft: Path) -> bool:
    """Return whether the process that wrote ``draft`` has ended, so that nobody will rename it."""
    found = DRAFT.fullmatch(draft.name)
    process = int(found["process"]) if found else 0
    if process == os.getpid():
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # a process of somebody else
        return False
    return False


def current_umask() -> int:
    """Return the permissions that new files are made without; the only way to read them is to set them."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically."""
    write_atomically(path, lambda draft: draft.write_text(text, encoding="utf-8"))
