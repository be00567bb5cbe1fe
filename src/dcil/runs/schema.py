"""Checks of values that were read from JSON, put together to the schema of a kind of file.

A check is called with a value and the name of its field, and raises a ValueError that says what should be there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any, str], None]
#: No count, step or time of a run comes near it, and sums of such numbers stay exact enough to be printed.
LARGEST = 2.0**63


def wrong(name: str, expected: str, value: Any) -> ValueError:
    """Return the error for a field that should be something else."""
    return ValueError(f"field {name!r} should be {expected}, not {repr(value)[:60]}")


def anything(value: Any, name: str) -> None:
    """Accept every value."""


def text(value: Any, name: str) -> None:
    """Accept a string."""
    if not isinstance(value, str):
        raise wrong(name, "a string", value)


def boolean(value: Any, name: str) -> None:
    """Accept true and false."""
    if not isinstance(value, bool):
        raise wrong(name, "true or false", value)


def whole(low: float = 0, high: float = LARGEST) -> Check:
    """Accept whole numbers from ``low`` to ``high``; booleans are none."""

    def check(value: Any, name: str) -> None:
        if type(value) is not int:
            raise wrong(name, "a whole number", value)
        _within(low, high, value, name)

    return check


def number(low: float = -LARGEST, high: float = LARGEST) -> Check:
    """Accept finite numbers from ``low`` to ``high``."""

    def check(value: Any, name: str) -> None:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise wrong(name, "a finite number", value)
        _within(low, high, value, name)

    return check


def _within(low: float, high: float, value: float, name: str) -> None:
    if not low <= value <= high:
        bounds = f">= {low:g}" if high == LARGEST else f"from {low:g} to {high:g}"
        raise wrong(name, bounds, value)


def nullable(check: Check) -> Check:
    """Accept null, and what ``check`` accepts."""
    return lambda value, name: None if value is None else check(value, name)


def list_of(check: Check, shortest: int = 0) -> Check:
    """Accept lists of at least ``shortest`` items that ``check`` accepts."""

    def check_list(value: Any, name: str) -> None:
        if not isinstance(value, list) or len(value) < shortest:
            raise wrong(name, f"a list of at least {shortest}" if shortest else "a list", value)
        for item in value:
            check(item, name)

    return check_list


def entries(*named: tuple[str, Check]) -> Check:
    """Accept lists of lists, in which each item has a name and a check of its own."""
    form = f"[{', '.join(name for name, _ in named)}]"

    def check_entry(value: Any, name: str) -> None:
        if not isinstance(value, list) or len(value) != len(named):
            raise wrong(name, form, value)
        try:
            for (_, check), item in zip(named, value, strict=True):
                check(item, name)
        except ValueError:
            raise wrong(name, form, value) from None

    return list_of(check_entry)


def mapping_of(check: Check) -> Check:
    """Accept objects of any keys whose values ``check`` accepts."""

    def check_mapping(value: Any, name: str) -> None:
        if not isinstance(value, dict):
            raise wrong(name, "an object", value)
        for key, item in value.items():
            check(item, f"{name}.{key}")

    return check_mapping


def fields(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Accept objects with the ``required`` fields; ``optional`` ones are checked if there, others ignored."""

    def check_fields(value: Any, name: str) -> None:
        if not isinstance(value, dict):
            raise wrong(name, "an object", value) if name else ValueError("not a JSON object")
        for key, check in {**required, **(optional or {})}.items():
            inner = f"{name}.{key}" if name else key
            if key in value:
                check(value[key], inner)
            elif key in required:
                raise ValueError(f"field {inner!r} is missing")

    return check_fields
