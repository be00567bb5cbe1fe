"""The lock is exclusive whoever comes and goes, and it leaves no file."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dcil.errors import UserError
from dcil.runs.file_lock import exclusive
from dcil.runs.folder import RunFolder

SECONDS, PROCESSES = 1.5, 6


def enter_often(folder: Path, until: float) -> int:
    """Enter as often as possible; return how often another one was inside at the same time."""
    together = entered = 0
    while time.monotonic() < until:
        with suppress(UserError), exclusive(folder / ".lock", "busy"):
            try:
                os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                together += 1
            else:
                entered += 1
                os.unlink(folder / "inside")
    (folder / f"entered-{os.getpid()}").write_text(str(entered))
    return together


def test_never_two_inside(tmp_path):
    until = time.monotonic() + SECONDS
    children = []
    for _ in range(PROCESSES):
        if (child := os.fork()) == 0:
            os._exit(min(enter_often(tmp_path, until), 100))
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * PROCESSES
    counts = [int(file.read_text()) for file in tmp_path.glob("entered-*")]
    assert len(counts) == PROCESSES
    assert sum(counts) > 100
    assert not (tmp_path / ".lock").exists()


def test_whoever_opened_a_lock_that_was_removed_does_not_hold_it(tmp_path, monkeypatch):
    """Between opening and locking, the holder removes the file and another one takes a new one."""
    import fcntl

    lock, flock, others = tmp_path / ".lock", fcntl.flock, []

    def slowly(file, how):
        if not others and how & fcntl.LOCK_EX:
            lock.unlink()
            others.append(lock.open("a"))
            flock(others[0], fcntl.LOCK_EX)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", slowly)
    with pytest.raises(UserError, match="busy"), exclusive(lock, "busy"):
        pytest.fail("two inside")
    assert lock.exists()  # it is the other's
    others[0].close()


def test_threads_exclude_each_other_and_errors_release(tmp_path):
    folder = RunFolder(tmp_path / "r")
    with pytest.raises(ZeroDivisionError), folder.locked():
        with pytest.raises(UserError, match="one process at a time"), folder.locked():
            pass
        assert (folder.path / ".lock").exists()
        _ = 1 // 0
    assert list(folder.path.iterdir()) == []
    with folder.locked():
        pass


def test_a_child_does_not_keep_the_lock_of_its_parent(tmp_path):
    """A worker of a data loader may live for seconds after its parent was killed."""
    reading, writing = os.pipe()
    if (parent := os.fork()) == 0:
        with exclusive(tmp_path / ".lock", "busy"):
            if os.fork() == 0:
                os.write(writing, b"%d" % os.getpid())
                time.sleep(30)
            os.read(reading, 0)
            time.sleep(30)
    child = int(os.read(reading, 20))
    try:
        os.kill(parent, 9)
        os.waitpid(parent, 0)
        with exclusive(tmp_path / ".lock", "busy"):
            pass
    finally:
        os.kill(child, 9)
    assert not (tmp_path / ".lock").exists()


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(37, "No locks available")])
def test_a_folder_that_cannot_be_locked_is_named(tmp_path, monkeypatch, error):
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr("fcntl.flock" if error.errno == 37 else "pathlib.Path.open", fails)
    with pytest.raises(UserError, match=f"{tmp_path}.*{error.strerror}"), exclusive(tmp_path / ".lock", "busy"):
        pass
