"""Ctrl-C while the command is starting: importing torch takes seconds, and its traceback would help nobody."""

from __future__ import annotations

import os
import signal
import sys


def is_command() -> bool:
    """Return whether this process is ``dcil`` or ``python -m dcil``, rather than a program that imports the library."""
    name: str = (getattr(sys, "argv", None) or [""])[0]
    if name == "-m":  # what Python calls a module while it imports the package around it
        words = list(sys.orig_argv)
        return "-m" in words and words[words.index("-m") + 1 :][:1] == ["dcil"]
    return os.path.basename(name) == "dcil"


if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the process; the command line listens again
