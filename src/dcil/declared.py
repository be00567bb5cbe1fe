"""Declared keys: what an engine may record of a method, never guessed from its type."""

from __future__ import annotations

from dataclasses import dataclass

from dcil.criteria import Criterion
from dcil.granularity import Granularity
from dcil.scope import Scope


@dataclass(frozen=True)
class Selection:
    """The key of the base class's mask update: everything that its result depends on besides tensors."""

    sparsity: float
    granularity: Granularity
    criterion: Criterion
    scope: Scope
    min_kept: int


FORWARD = ("prepare", "view", "product", "added_gradient", "after_step")
UPDATE = ("update", "group_scores")
#: Key -> the hooks whose computation it declares. A subclass that overrides one of them must declare the key anew.
DECLARES = {
    "loss_key": (*FORWARD, "share", "loss"),
    "view_key": ("view",),
    "update_key": UPDATE,
    "shards": (*FORWARD, *UPDATE, "init_state", "start"),
}


def withdraw_keys(kind: type) -> None:
    """Give a class that overrides hooks without declaring their keys a key that says nothing."""
    for key, hooks in DECLARES.items():
        if key not in vars(kind) and any(hook in vars(kind) for hook in hooks):
            setattr(kind, key, _undeclared)


def _undeclared(self: object, *args: object) -> None:
    """The key of a subclass that overrides a hook and says nothing about recording it."""
