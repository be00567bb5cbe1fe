"""Names of files as text that any terminal, page or shell takes as it is."""

from __future__ import annotations

import os
import shlex
from pathlib import Path


def printable(text: str) -> str:
    """Return ``text`` with backslash escapes for control characters and bytes that are not UTF-8; newlines stay."""
    return "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in text)


def quoted(path: Path) -> str:
    """Return ``path`` as one word of a shell's command line that is no option."""
    text = str(path)
    if text.startswith("-"):
        text = f"./{text}"
    if text.isprintable():
        return shlex.quote(text)
    plain = (
        chr(byte) if 32 <= byte < 127 and chr(byte) not in "'\\" else f"\\x{byte:02x}" for byte in os.fsencode(text)
    )
    return f"$'{''.join(plain)}'"


def _escaped(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # how Python holds a byte of a file name that is not UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")
