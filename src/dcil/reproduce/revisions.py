"""Revisions: changes of the library that alter what a cell computes, by which older records are told from newer ones.

A session of a record holds the number of revisions at its time (none: 0). Whoever changes what a recipe computes adds
one here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcil.train import Config


@dataclass(frozen=True)
class Revision:
    """``epoch`` maps a config and the steps of its epochs to the epoch (from 0) in which such a run meets the change,
    or to None if it does not."""

    what: str
    epoch: Callable[[Config, int], int | None]


def _target_epoch(config: Config, epoch_steps: int) -> int | None:
    """The epoch that ends with the target step, at which the masks were updated whether that was due or not."""
    method = config.build_method(epoch_steps)
    ramped = config.method in ("dcil", "dpf") and method.target_step % method.period != 0
    return config.target_epoch - 1 if ramped else None


REVISIONS = (
    Revision("no mask update at the target step, but at the next multiple of 16", _target_epoch),
    Revision(
        "the classifier's bias of wide ResNets begins at 0",
        lambda config, _: 0 if config.model.startswith("wrn") else None,
    ),
    Revision(
        "RigL moves as large a part of nearly dense layers as of others",
        lambda config, _: 0 if config.method == "rigl" else None,
    ),
)


def older_than(config: Config, epoch_steps: int, sessions: Sequence[Mapping[str, Any]]) -> list[Revision]:
    """Return the revisions that concern a run of ``config`` and are newer than its session that would have met them."""
    found = []
    for number, revision in enumerate(REVISIONS, start=1):
        epoch = revision.epoch(config, epoch_steps)
        if epoch is not None:
            there = [session["code"].get("revision", 0) for session in sessions if session["after"] <= epoch]
            if (there[-1] if there else 0) < number:
                found.append(revision)
    return found
