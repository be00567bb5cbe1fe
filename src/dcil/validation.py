"""Validated: frozen settings whose values are checked by type and range when they are made."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from dcil.errors import UserError, shown

#: The largest count (steps, epochs, groups): beyond it products with fractions are no longer exact.
MOST = 2**53
KINDS = {"int": "a whole number", "float": "a finite number", "bool": "True or False", "str": "a text", "None": "None"}


class Validated:
    """Base of frozen dataclasses: ``__post_init__`` checks types by annotation, subclasses ``require`` ranges."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = plain(getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            kinds = str(getattr(field.type, "__name__", field.type)).split(" | ")
            if all(kind in KINDS for kind in kinds):
                wanted = " or ".join(KINDS[kind] for kind in kinds)
                self.require(field.name, any(is_a(kind, value) for kind in kinds), wanted)

    def require(self, field: str, ok: bool, must: str, hint: str = "") -> None:
        """Refuse a setting: the message says what must hold, what was given, and the way out."""
        if not ok:
            way_out = f" ({hint})" if hint else ""
            raise UserError(f"{self._called(field)} must be {must}, got {shown(getattr(self, field))}{way_out}")

    def _called(self, field: str) -> str:
        return f"{type(self).__name__}: {field}"


def new_default(value: Any, *, before: Any) -> Any:
    """A setting whose default was another one ``before``: what was saved then without naming it goes on with that."""
    return dataclasses.field(default=value, metadata={"before": before})


def plain(value: Any) -> Any:
    """A Python number for a numpy scalar, or another 0-dimensional array; any other value as it is."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        try:
            return value.item()
        except (RuntimeError, NotImplementedError, TypeError, ValueError):  # such as a tensor on the meta device
            return value
    return value


def is_a(kind: str, value: Any) -> bool:
    """Whether ``value`` is of the type that an annotation names: a bool is no number, a whole number is a float."""
    if kind in ("int", "float"):
        allowed = int if kind == "int" else (int, float)
        return isinstance(value, allowed) and not isinstance(value, bool) and is_finite(value)
    return value is None if kind == "None" else isinstance(value, {"bool": bool, "str": str}[kind])


def is_finite(value: float) -> bool:
    """Whether a number is finite as a float, too."""
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the floats
        return False
