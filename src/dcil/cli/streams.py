"""Standard output and error that any text can be written to, whatever they are connected to."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import TextIO

from dcil.runs.printable import printable

#: Why a write to a stream fails.
WRITE_ERRORS = (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EBADF, errno.EDQUOT, errno.EAGAIN)


def prepare() -> None:
    """Open the streams that the caller has closed, and let what an encoding lacks be written as escapes."""
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:  # else the next file to be opened becomes standard output
        pass
    os.close(free)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # open until the process ends
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def complain(message: str) -> None:
    """Write one line to standard error."""
    try:
        sys.stderr.write(f"dcil: {printable(' '.join(message.split()))}\n")
        sys.stderr.flush()
    except OSError:  # there is nobody left to tell
        discard(sys.stderr)


def flush() -> OSError | None:
    """Write what is buffered for standard output; return the error if that fails, and discard the rest."""
    try:
        sys.stdout.flush()
    except OSError as error:
        discard(sys.stdout)
        return error
    except ValueError:  # closed by whoever called
        pass
    return None


def discard(stream: TextIO) -> None:
    """Connect a broken stream to nothing, so that the interpreter does not fail on it when it exits."""
    with suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())
