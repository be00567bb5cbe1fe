"""What a search draws: values for options of a run and settings of its method, each from a range or a list."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcil import METHODS
from dcil.errors import UserError, unknown
from dcil.train.config import Config
from dcil.train.method_settings import FLAGS, PARTS, parse_value
from dcil.train.plan import DEFAULT_METHOD, Options, new_config

RANGE = re.compile(r"(?P<low>[^:,]+?)\.\.(?P<high>[^:,]+?)(?P<log>:log)?")
#: Options that are not drawn: scores must be comparable, seeds are noise, and ASHA decides how long a trial lasts.
NOT_DRAWN = ("settings", "dataset", "tokens", "seed", "epochs", "finetune_epochs")
#: Before a setting of the method whose name an option has too.
PREFIX = "set."
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Axis:
    """The values of one option or setting: those of ``choices``, or all from ``low`` to ``high``."""

    name: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False

    @property
    def ends(self) -> tuple[Any, ...]:
        """Values with which the axis is checked."""
        return self.choices or (self.low, self.high)


def parse_axis(text: str, methods: Sequence[str]) -> Axis:
    """Read NAME=LOW..HIGH, NAME=LOW..HIGH:log or NAME=A,B,C for runs of ``methods``."""
    name, equals, given = text.partition("=")
    name = name.strip().replace("-", "_")
    if not (name and equals and given):
        raise UserError(f"--search must be NAME=LOW..HIGH, NAME=LOW..HIGH:log or NAME=A,B,C, got {text!r}")
    kind = kind_of(name, methods)
    try:
        if found := RANGE.fullmatch(given):
            low, high = (parse_value(kind, found[end]) for end in ("low", "high"))
            return checked(Axis(name, (), low, high, bool(found["log"]), isinstance(low, int)), text)
        words = [word for word in given.split(",") if word]
        choices = tuple(word if kind in PARTS else parse_value(kind, word) for word in words)
    except ValueError as error:
        raise UserError(f"--search {text}: each value {error}") from None
    if len(set(choices)) < max(2, len(choices)):
        raise UserError(f"--search {text}: {name} must have two values at least, each once")
    return Axis(name, choices)


def checked(axis: Axis, text: str) -> Axis:
    """Refuse ends that are no range."""
    numbers = all(isinstance(end, int | float) and not isinstance(end, bool) for end in axis.ends)
    if not numbers or not axis.low < axis.high or (axis.log and axis.low <= 0):
        raise UserError(f"--search {text}: a range must go from a smaller to a larger number, with :log both above 0")
    return axis


def kind_of(name: str, methods: Sequence[str]) -> Any:
    """Return the type of an option, or of a setting that all ``methods`` have."""
    hints = typing.get_type_hints(Config)
    options = {field.name: hints[field.name] for field in dataclasses.fields(Config) if field.name not in NOT_DRAWN}
    if name in options:
        return options[name]
    setting, types = name.removeprefix(PREFIX), typing.get_type_hints(METHODS[methods[0]])
    common = set.intersection(*({f.name for f in dataclasses.fields(METHODS[method])} for method in methods))
    if setting not in common - FLAGS.keys():
        raise unknown("option or setting to search", name, {*options, *common} - FLAGS.keys())
    return types[setting]


def parse_space(texts: Sequence[str], options: Options) -> tuple[Axis, ...]:
    """Read the axes of a search of runs with ``options``; each must have a name of its own."""
    methods: list[str] = [options.get("method", DEFAULT_METHOD)]
    for text in texts:
        if text.startswith("method="):
            methods = text.removeprefix("method=").split(",")
    for method in methods:
        if method not in METHODS:
            raise unknown("method", method, METHODS)
    space = tuple(parse_axis(text, methods) for text in texts)
    names = [axis.name for axis in space]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--search must name each option once, got {repeated[0]} twice")
    if both := [name for name in names if name in options]:
        raise UserError(f"--search draws the values of --{both[0].replace('_', '-')}; give one of the two")
    return space


def combinations(space: Sequence[Axis]) -> float:
    """Return how many trials differ: infinitely many, unless every axis lists its values."""
    return math.prod(len(axis.choices) or math.inf for axis in space)


def not_tried(space: Sequence[Axis], known: Sequence[Values]) -> list[dict[str, Any]]:
    """Return the combinations of lists that are not among the ``known`` trials."""
    names, tried = [axis.name for axis in space], {trial_name(values) for values in known}
    found = (dict(zip(names, values, strict=True)) for values in itertools.product(*(axis.choices for axis in space)))
    return [values for values in found if trial_name(values) not in tried]


def check_space(space: Sequence[Axis], options: Options, recipe: str | None) -> None:
    """Build a config with each end of each axis, the others at their first: what cannot work is said before all."""
    first = {axis.name: axis.ends[0] for axis in space}
    for axis in space:
        for value in axis.ends:
            config_with(first | {axis.name: value}, options, recipe)


def config_with(values: Values, options: Options, recipe: str | None) -> Config:
    """Return the config of the trial with ``values``."""
    fields = {field.name for field in dataclasses.fields(Config)}
    drawn = {name: value for name, value in values.items() if name in fields}
    settings = {name.removeprefix(PREFIX): value for name, value in values.items() if name not in fields}
    asked = {**options, **drawn, "settings": {**options.get("settings", {}), **settings}}
    method = asked.pop("method", None)
    return new_config(method, asked, recipe)


def trial_name(values: Values) -> str:
    """Return the name of a trial's folder, which follows from its values."""
    text = json.dumps(dict(values), sort_keys=True)
    return f"trial-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
