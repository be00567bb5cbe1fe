"""Read JSON files that may be damaged or of somebody else; what is wrong with one is a ValueError or an OSError.

What ``parse`` returns can be printed, encoded, compared and written again: text is without lone surrogates and control
characters, nesting is shallow, whole numbers fit into 64 bits.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

LARGEST_FILE = 2**30
DEEPEST = 50
LARGEST = 2**64
#: All control characters but tab and newline, and halves of surrogate pairs.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def read_bytes(file: Path) -> bytes:
    """Read a regular file; a pipe or a device, which could block or never end, is refused."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        content = opened.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise ValueError(f"larger than {LARGEST_FILE:,} bytes")
    return content


def read_text(file: Path) -> str:
    """Read a regular file of UTF-8, with or without a byte order mark."""
    return read_bytes(file).decode("utf-8-sig")


def parse(text: str) -> Any:
    """Parse JSON; an object that has a key twice is refused."""
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} levels deep") from None
    level, deep = [value], 0
    while level:
        if deep > DEEPEST:
            raise ValueError(f"nested more than {DEEPEST} levels deep")
        level, deep = [inner for outer in level for inner in _checked(outer)], deep + 1
    return value


def parse_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    value = parse(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"field {next(n for n in names if names.count(n) > 1)!r} stands there twice")
    return found


def _checked(value: Any) -> list[Any]:
    """Check one value and return the values within it."""
    if isinstance(value, str) and UNPRINTABLE.search(value):
        raise ValueError(f"control characters and lone surrogates are not allowed in text, got {repr(value)[:60]}")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError("whole numbers must fit into 64 bits")
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list) else []
