"""Parse the settings of a method and the options of a run: text or JSON in, values of the right type out."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

from dcil import (
    ERK,
    LAMP,
    NM,
    OBD,
    OBS,
    Alternating,
    AtSteps,
    Constant,
    Criterion,
    Cubic,
    Filter,
    Global,
    Gradient,
    Granularity,
    Magnitude,
    Method,
    Never,
    Schedule,
    Scope,
    Taylor,
    Uniform,
    Weight,
)
from dcil.errors import UserError, unknown
from dcil.schedule import Stretched
from dcil.scope import UniformFloor

GRANULARITIES: dict[str, Granularity] = {"weight": Weight(), "filter": Filter()}
CRITERIA: dict[str, Criterion] = {
    "magnitude": Magnitude(),
    "lamp": LAMP(),
    "gradient": Gradient(),
    "taylor": Taylor(),
    "obd": OBD(),
    "obs": OBS(),
}
SCOPES: dict[str, Scope] = {
    "global": Global(),
    "uniform": Uniform(),
    "uniform-floor": UniformFloor(),
    "er": ERK(kernel=False),
    "erk": ERK(),
}
SCHEDULES: dict[str, Schedule] = {
    "cubic": Cubic(),
    "constant": Constant(),
    "at-steps": AtSteps(),
    "stretched": Stretched(),
    "alternating": Alternating(),
    "never": Never(),
}
#: Type of a setting whose values have names, on the command line and in config.json -> name -> value.
PARTS: dict[Any, Mapping[str, Any]] = {Criterion: CRITERIA, Schedule: SCHEDULES, Scope: SCOPES}
#: Settings that follow from options of their own.
FLAGS = {
    "sparsity": "--sparsity",
    "steps": "--epochs",
    "finetune": "--finetune-epochs",
    "ramp": "--target-epoch",
    "epoch_steps": "--batch",
    "smooth": "--schedule",
    "granularity": "--granularity",
    "seed": "--seed",
}
#: Numbers as they are typed, short enough for their error to be one line.
PLAIN_NUMBER = re.compile(r"[-+]?[0-9.]+([eE][-+]?[0-9]+)?|[-+]?(nan|inf|infinity)", re.IGNORECASE)
BOOLEANS = {"true": True, "false": False, "1": True, "0": False}
KINDS = {
    bool: "a bool (true or false)",
    int: "a whole number (int)",
    float: "a number (float)",
    str: "a text",
    tuple[int, ...]: "epochs such as 150,225",
    tuple[float, ...]: "numbers such as 0.9,0.999",
    dict[str, Any]: "an object of settings",
}


def granularity_named(name: str) -> Granularity:
    """Return the granularity called weight, filter or N:M, such as 2:4."""
    if pattern := re.fullmatch(r"(\d{1,9}):(\d{1,9})", name):
        return NM(int(pattern[1]), int(pattern[2]))
    if name not in GRANULARITIES:
        raise unknown("granularity", name, [*GRANULARITIES, "2:4"])
    return GRANULARITIES[name]


def parse_value(kind: Any, value: Any) -> Any:
    """Convert ``value``, text or JSON, to the type ``kind``; ValueError says what must hold."""
    if types.NoneType in typing.get_args(kind):
        if str(value).lower() == "none":
            return None
        kind = next(t for t in typing.get_args(kind) if t is not types.NoneType)
    try:
        return _convert(kind, value)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(f"must be {KINDS.get(kind, kind)}, got {repr(value)[:80]}") from None


def _convert(kind: Any, value: Any) -> Any:
    if kind is bool:
        return BOOLEANS[str(value).lower()]
    if kind in (tuple[int, ...], tuple[float, ...]):
        parts = [part for part in value.split(",") if part] if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            raise TypeError
        return tuple(_convert(typing.get_args(kind)[0], part) for part in parts)
    if kind == dict[str, Any]:
        if not isinstance(value, dict):
            raise TypeError
        return dict(value)
    if isinstance(value, bool) or (kind is int and isinstance(value, float)):
        raise TypeError
    if kind is str and not isinstance(value, str):
        raise TypeError
    if kind in (int, float) and isinstance(value, str) and not PLAIN_NUMBER.fullmatch(value):
        raise TypeError  # Python also takes 1_000, other scripts' digits and spaces
    return kind(value)


def parse_settings(kind: type[Method], given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings of a method, given as text or JSON, to the types of its fields."""
    allowed = _types(kind)
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in FLAGS:
            raise UserError(f"--set {name}={value}: {name} follows from {FLAGS[name]}; use that option")
        if name not in allowed:
            raise unknown(f"setting of {kind.__name__}", name, allowed)
        if (parts := PARTS.get(allowed[name])) is not None and value not in parts.values():
            if str(value) not in parts:
                raise unknown(name, str(value), parts)
            value = parts[str(value)]
        elif parts is None:
            try:
                value = parse_value(allowed[name], value)
            except ValueError as error:
                raise UserError(f"--set {name}={value}: {name} of {kind.__name__} {error}") from None
        found[name] = value
    return found


def check_settings(kind: type[Method], settings: Mapping[str, Any]) -> None:
    """Refuse settings that the method does not have and values that are not of their field's type."""
    for name, value in settings.items():
        parsed = parse_settings(kind, {name: value})[name]
        if type(parsed) is not type(value) and not (isinstance(parsed, float) and isinstance(value, int)):
            raise UserError(f"{kind.__name__}: {name} must be a value such as {parsed!r}, got {value!r}")


def settings_to_json(kind: type[Method], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with the names of parts in place of the parts, as config.json has them."""
    parts = {name: PARTS.get(wanted, {}) for name, wanted in _types(kind).items()}
    return {k: next((name for name, part in parts[k].items() if part == v), v) for k, v in settings.items()}


def _types(kind: type[Method]) -> dict[str, Any]:
    """Return the settings that may be given to a method, with their types."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.name not in FLAGS}
