"""UserError: one line with what must hold, what was given and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Wrong input; the command line prints the message and exits with ``exit_code``."""

    exit_code = 2


class Diverged(UserError):
    """Weights or loss are no longer finite: the training failed, not its settings."""

    exit_code = 1


def described(value: object) -> str:
    """What was given, for an error's one line: its value where that is short, else its type."""
    text = repr(value) if isinstance(value, (str, bytes, int, float, list, tuple, dict, set, type(None))) else ""
    if not text or len(text) > 60 or "\n" in text:
        return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
    return text


def unknown(kind: str, given: str, allowed: Iterable[str], nearest_only: bool = False) -> UserError:
    """Return the error for a name that is not allowed: the name, the nearest allowed one, all of them."""
    names = sorted(allowed)
    near = nearest(given, names)
    hint = f"did you mean {near!r}? " if near else ""
    listing = "" if nearest_only and near else f"allowed: {', '.join(names)}"
    return UserError(f"unknown {kind} {given!r}: {hint}{listing}".rstrip(": "))


def shown(value: object) -> str:
    """Return a value's representation for a message: one short line, whatever it is."""
    try:
        line = " ".join(repr(value).split())
        return line if len(line) <= 100 else f"{line[:99]}…"
    except Exception:  # a representation of the user's own, or a number of thousands of digits
        return f"a value of type {type(value).__name__}"


class MissingExtra(UserError):
    """An optional package is not installed."""


def missing_extra(package: str, extra: str) -> MissingExtra:
    """Return the error for an optional package that is not installed: it names the extra that brings it."""
    return MissingExtra(f"{package} must be installed for this: pip install 'dcil[{extra}]'")


def nearest(given: str, names: Iterable[str]) -> str | None:
    """Return the most similar name, or None; of equally similar ones that with the longest common substring."""

    def likeness(name: str) -> tuple[float, int]:
        matcher = difflib.SequenceMatcher(None, given, name)
        start = matcher.find_longest_match(0, len(given), 0, len(name))
        return matcher.ratio(), start.size

    found = max(names, key=likeness, default=None)
    return found if found is not None and likeness(found)[0] >= 0.5 else None
