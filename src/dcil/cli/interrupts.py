"""Ctrl-C in a process that runs one command: one line for the first, the end of the process for the next."""

from __future__ import annotations

import signal
from types import FrameType
from typing import NoReturn


def listen() -> None:
    """Let the first Ctrl-C raise KeyboardInterrupt and the next end the process, also one while it exits.

    Nothing is lost by that: files appear by atomic renames. Where Ctrl-C is ignored (nohup), it stays so.
    """
    if signal.getsignal(signal.SIGINT) in (signal.SIG_DFL, signal.default_int_handler):
        signal.signal(signal.SIGINT, interrupt)


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt
