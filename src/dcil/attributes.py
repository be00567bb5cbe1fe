"""Attributes: what a forward pass keeps in plain attributes of modules (a hidden state, a counter), for each path.

A path is given parameters and buffers of its own; other attributes are those of the one model that computes every path.
The ones that its forward pass changes are exchanged around the passes, so that each path goes on from its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

#: A module and the name of one of its attributes.
Place = tuple[nn.Module, str]
#: What torch itself keeps on every module.
INTERNAL = frozenset(vars(nn.Module()))
ABSENT = object()


class Attributes:
    """The attributes that forward passes change, with the value that each path left.

    Between the passes the modules hold the first path's values. What is assigned there in between, such as a hidden
    state that the training loop resets, is every path's.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.values: dict[str, dict[Place, Any]] = {path: {} for path in paths}
        self.marks: dict[Place, Any] = {}

    def __reduce__(self) -> tuple[type[Attributes], tuple[list[str]]]:
        return Attributes, (list(self.values),)  # a copy goes on from what its modules hold

    @contextmanager
    def of(self, path: str, model: nn.Module, watch: bool) -> Iterator[None]:
        """While open, the modules have the attributes of ``path``; with ``watch`` those that change are looked for."""
        if len(self.values) == 1 or not (watch or self.marks):
            yield
            return
        self.take_assigned()
        for place, value in self.values[path].items():
            put(place, value)
        before = {place: (mark(value), fork(value)) for place, value in found_in(model)} if watch else {}
        try:
            yield
        finally:
            if watch:
                self.find_changed(dict(found_in(model)), before)
            first, *_ = self.values
            self.values[path] = {place: get(place) for place in self.values[first]}
            for place, value in self.values[first].items():
                put(place, value)
            self.marks = {place: mark(value) for place, value in self.values[first].items()}

    @contextmanager
    def trial(self, path: str, model: nn.Module) -> Iterator[None]:
        """While open, the modules have copies of the attributes of ``path``; afterwards they have what they had."""
        self.take_assigned()
        before = dict(found_in(model))
        for place, value in (before | self.values[path]).items():
            put(place, fork(value))
        try:
            yield
        finally:
            for place, value in (dict(found_in(model)) | before).items():
                if place in before or is_state(ABSENT, value):
                    put(place, before.get(place, ABSENT))

    def take_assigned(self) -> None:
        """Give every path what was assigned since the last pass."""
        for place, known in self.marks.items():
            if mark(value := get(place)) != known:
                for number, values in enumerate(self.values.values()):
                    values[place] = fork(value) if number else value

    def find_changed(self, now: dict[Place, Any], before: dict[Place, Any]) -> None:
        """Add the places that a pass has changed: every path has what was there before."""
        for place in dict.fromkeys((*before, *now)):
            known, forked = before.get(place, (mark(ABSENT), ABSENT))
            value = now.get(place, ABSENT)
            if place not in self.marks and mark(value) != known and is_state(forked, value):
                for values in self.values.values():
                    values[place] = fork(forked)


def is_state(before: Any, now: Any) -> bool:
    """Whether an attribute that changed is a path's own. One that forward made is not, unless it depends on weights:
    it marks something that is done once (a table, hooks installed), and may not be done again for another path."""
    return before is not ABSENT or depends_on_weights(now)


def depends_on_weights(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    items = value.values() if isinstance(value, dict) else value
    return isinstance(value, (list, tuple, set, dict)) and any(map(depends_on_weights, items))


def found_in(model: nn.Module) -> Iterator[tuple[Place, Any]]:
    """Yield the plain attributes of all modules."""
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in INTERNAL:
                yield (module, name), value


def get(place: Place) -> Any:
    return vars(place[0]).get(place[1], ABSENT)


def put(place: Place, value: Any) -> None:
    if value is ABSENT:
        vars(place[0]).pop(place[1], None)
    else:
        vars(place[0])[place[1]] = value


@dataclass(frozen=True, eq=False)
class Same:
    """An object, compared by identity; an ``id()`` could be that of a later object."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value


def mark(value: Any) -> Any:
    """By what a change is recognised: of a tensor its version, of a collection its items, else the object."""
    if isinstance(value, Tensor):
        return Same(value), None if value.is_inference() else value._version
    if isinstance(value, (list, tuple, set, dict)):
        items = (*value, *value.values()) if isinstance(value, dict) else value
        return Same(value), [mark(item) for item in items]
    return value if isinstance(value, (bool, int, float, str)) else Same(value)


def fork(value: Any) -> Any:
    """The same value, which changes in place do not reach."""
    if type(value) is Tensor:
        return value.detach().clone()
    if type(value) is dict:
        return {key: fork(item) for key, item in value.items()}
    return type(value)(map(fork, value)) if type(value) in (list, tuple, set) else value
