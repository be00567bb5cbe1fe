"""Damage to files: bytes flipped, cut, doubled or put in; JSON fields swapped for what they must not be."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

#: What a JSON field is replaced by; numbers that fit, too, since those are the hardest to notice.
POISON = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    1.5,
    -0.0,
    10**30,
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "0",
]
POISON += ["\ud800", "<b>x</b>", "../x", "/etc/passwd", "\x00", "a" * 5000, [], [None], [[[]]], {}, {"x": 1}, {"": {}}]


def flip(raw: bytes, chance: random.Random) -> bytes:
    """Flip one bit."""
    changed = bytearray(raw)
    changed[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def cut(raw: bytes, chance: random.Random) -> bytes:
    """Keep the beginning."""
    return raw[: chance.randrange(len(raw))]


def double(raw: bytes, chance: random.Random) -> bytes:
    """Write it twice, or a piece of it twice."""
    start = chance.choice([0, chance.randrange(len(raw))])
    return raw + raw[start:]


def splice(raw: bytes, chance: random.Random) -> bytes:
    """Put in bytes that are neither UTF-8 nor JSON."""
    at = chance.randrange(len(raw))
    return raw[:at] + chance.choice([b"\xff\xfe", b"\x00" * 16, b"\xc3(", b"\xed\xa0\x80", b"\r\n"]) + raw[at:]


def drop(raw: bytes, chance: random.Random) -> bytes:
    """Leave out a piece."""
    at = chance.randrange(len(raw))
    return raw[:at] + raw[at + chance.randrange(1, 64) :]


def nest(raw: bytes, chance: random.Random) -> bytes:
    """Be very deep JSON."""
    depth = chance.choice([1000, 100_000])
    return chance.choice([b"[" * depth, b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth])


def swap_field(raw: bytes, chance: random.Random) -> bytes:
    """Replace, remove or repeat one field of the JSON, or of one line of it, or of a safetensors header."""
    if len(raw) > 8 and raw[8:9] == b"{" and int.from_bytes(raw[:8], "little") < len(raw):
        size = int.from_bytes(raw[:8], "little")
        header = swap_field(raw[8 : 8 + size], chance)
        return len(header).to_bytes(8, "little") + header + raw[8 + size :]
    lines = raw.splitlines() if raw.count(b"}\n{") else [raw]
    which = chance.randrange(len(lines))
    value = json.loads(lines[which])
    holder, key = chance.choice(places(value))
    if chance.random() < 0.2 and isinstance(holder, dict):
        del holder[key]
    else:
        holder[key] = chance.choice(POISON)
    lines[which] = json.dumps(value).encode()
    return b"\n".join(lines) + b"\n"


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return (holder, key) of every field in ``value``."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    found = [(value, key) for key in keys]
    return found + [place for key in keys for place in places(value[key])]


def be_something_else(raw: bytes, chance: random.Random) -> bytes:
    """Be a whole file of another kind."""
    return chance.choice([b"", b"null", b"[]", b"{}", b"0", b'"x"', b"\x89PNG\r\n", b"\x7fELF", b"NaN", b"\n\n\n"])


BYTES: list[Callable[[bytes, random.Random], bytes]] = [flip, flip, flip, cut, double, splice, drop, be_something_else]
TEXT = [*BYTES, nest, *[swap_field] * 12]
