"""Position: how far a run is, also within an epoch, as the notes of a checkpoint have it.

Notes: ``epoch``; within an epoch also ``within``, JSON of the other fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from dcil.runs.json_file import parse_object
from dcil.runs.run_fields import SECONDS, UPDATES
from dcil.runs.schema import fields, list_of, number, whole

WITHIN = fields(
    {"batch": whole(1), "sums": list_of(number(-1e300, 1e300), shortest=3), "updates": UPDATES, "seconds": SECONDS}
)


@dataclass(frozen=True)
class Position:
    """Where a run stands: ``epoch`` epochs are done and, of the next one, ``batch`` batches. What these have given:

    sums      the loss over the targets, the hits, and the targets
    updates   the mask updates, each its step, the weights it revived and those it dropped
    seconds   of training
    """

    epoch: int = 0
    batch: int = 0
    sums: tuple[float, ...] = (0.0, 0.0, 0.0)
    updates: tuple[tuple[int, ...], ...] = ()
    seconds: float = 0.0

    @classmethod
    def from_notes(cls, notes: Mapping[str, str]) -> Position:
        """Read the notes of a checkpoint; ValueError or KeyError says what is wrong."""
        epoch = int(notes["epoch"])
        if "within" not in notes:
            return cls(epoch)
        found = parse_object(notes["within"])
        WITHIN(found, "")
        updates = tuple(tuple(update) for update in found["updates"])
        return cls(epoch, found["batch"], tuple(found["sums"]), updates, found["seconds"])

    def notes(self) -> dict[str, str]:
        """Return the notes of a checkpoint."""
        found = {"batch": self.batch, "sums": self.sums, "updates": self.updates, "seconds": self.seconds}
        return {"epoch": str(self.epoch)} | ({"within": json.dumps(found)} if self.batch else {})

    def check(self, step: int, steps_done: int, epoch_steps: int) -> None:
        """Refuse a position that does not fit the step that a checkpoint names, or the steps that its network did."""
        counted = self.epoch * epoch_steps + self.batch
        if not (steps_done == step == counted > 0 and 0 <= self.batch < epoch_steps):
            within = f", batch {self.batch}" if self.batch else ""
            raise ValueError(f"epoch {self.epoch}{within} and step {step} do not fit its {steps_done} steps")


#: Where every run begins.
START = Position()
