"""Faults at file operations: the preloaded library that counts them and strikes at the n-th (faults.c)."""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from forks import Outcome, isolated

LIBRARY = "DCIL_TORTURE_LIBRARY"


class Mode(enum.IntEnum):
    """What happens at the n-th operation."""

    OFF = 0
    COUNT = 1
    KILL = 2  # SIGKILL before it
    KILL_HALFWAY = 3  # SIGKILL after half of a write
    FAIL = 4  # it fails, once
    FAIL_ON = 5  # it and every later operation that writes fails: the disk stays full
    SHORT = 6  # a write takes half of what it is given


#: Name -> (mode, error number).
STRIKES = {
    "kill": (Mode.KILL, 0),
    "kill-halfway": (Mode.KILL_HALFWAY, 0),
    "ENOSPC": (Mode.FAIL, errno.ENOSPC),
    "ENOSPC-from-there-on": (Mode.FAIL_ON, errno.ENOSPC),
    "EIO": (Mode.FAIL, errno.EIO),
    "EACCES": (Mode.FAIL, errno.EACCES),
    "short": (Mode.SHORT, 0),
}
KILLS = ("kill", "kill-halfway")


def preload() -> None:
    """Compile the library and start this process again with it; do nothing where there is no C compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if LIBRARY in os.environ or compiler is None or sys.platform != "linux":
        return
    library = Path(tempfile.mkdtemp(prefix="torture-")) / "faults.so"
    source = Path(__file__).with_name("faults.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    environment = os.environ | {LIBRARY: str(library), "LD_PRELOAD": str(library)}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def available() -> bool:
    """Whether the library is loaded."""
    return LIBRARY in os.environ


def struck(
    work: Callable[[], object], below: Path, mode: Mode, at: int = 0, error: int = 0, limit: float = 60
) -> Outcome:
    """Run ``work`` in a child whose ``at``-th file operation below the folder ``below`` is struck."""
    arm = ctypes.CDLL(os.environ[LIBRARY]).arm

    def attacked() -> object:
        arm(os.fsencode(below), int(mode), ctypes.c_long(at), error, -1)
        try:
            return work()
        finally:
            arm(b"", int(Mode.OFF), ctypes.c_long(0), 0, -1)

    return isolated(attacked, limit)


def operations(work: Callable[[], object], below: Path) -> list[str]:
    """Return the file operations below ``below`` that ``work`` does, undisturbed."""
    with tempfile.TemporaryFile("w+") as trace:
        arm = ctypes.CDLL(os.environ[LIBRARY]).arm

        def traced() -> object:
            arm(os.fsencode(below), int(Mode.COUNT), ctypes.c_long(0), 0, trace.fileno())
            return work()

        outcome = isolated(traced)
        if outcome.code != 0:
            raise RuntimeError(f"the undisturbed command failed: {outcome.err}")
        trace.seek(0)
        return trace.read().splitlines()
