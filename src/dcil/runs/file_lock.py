"""An exclusive lock on a file that is there only while it is held."""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from dcil.errors import UserError
from dcil.runs.atomic import CannotWrite


class LockHeld(UserError):
    """Another process has the lock."""


_held: weakref.WeakSet[IO[str]] = weakref.WeakSet()


@contextmanager
def exclusive(file: Path, busy: str) -> Iterator[None]:
    """Hold the lock ``file`` while open, against processes and threads; ``busy`` is the error if another has it."""
    lock = acquire(file, busy)
    try:
        yield
    finally:
        with suppress(OSError):
            if names(file, lock):
                file.unlink()  # while it is held: whoever has opened it already learns in ``acquire`` that it is gone
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough where a child process has inherited it
        lock.close()


def acquire(file: Path, busy: str) -> IO[str]:
    """Open and lock ``file``, in a folder that is made if need be.

    One that was removed between the two locks out nobody, so it is tried again.
    """
    while True:
        lock = opened(file)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except BlockingIOError:
            locked = False
        except OSError as error:
            lock.close()
            raise UserError(
                f"{file.parent} must be on a file system with file locks, locking failed: {error.strerror or error}; "
                "choose another --out"
            ) from None
        if names(file, lock):
            if locked:
                _held.add(lock)
                return lock
            lock.close()
            raise LockHeld(busy)
        lock.close()


def opened(file: Path) -> IO[str]:
    """Open ``file``; its folder is made again if a process that leaves has just removed it."""
    for left in reversed(range(100)):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotWrite.at(file.parent, error) from None
        try:
            return file.open("a")
        except OSError as error:
            if not (left and isinstance(error, FileNotFoundError)):
                raise CannotWrite.at(file, error) from None
    raise AssertionError("unreachable: the last try raises")


def is_held(file: Path) -> bool:
    """Return whether a process has the lock ``file``: of any machine, where the file system's locks hold on all."""
    try:
        with file.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # closing the file releases it
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def names(file: Path, opened: IO[str]) -> bool:
    """Return whether the path ``file`` still names the file that is open."""
    try:
        return os.path.samestat(file.stat(), os.fstat(opened.fileno()))
    except FileNotFoundError:
        return False


def _release_in_child() -> None:
    """Close the locks that a forked process has inherited: it would hold them after its parent was killed."""
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_release_in_child)
