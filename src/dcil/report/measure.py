"""What a run is measured by: accuracy on images, validation loss on text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dcil.runs.read import EpochMetrics, RecordedRun
from dcil.runs.summary import Summary


@dataclass(frozen=True)
class Measure:
    """
    title, axis   in words, and as the label of an axis
    word          for the titles of figures that compare it with something
    digits        that are shown
    sign          1 where higher is better, else -1
    summary       its summary of a run
    at, super     its value at an epoch, of the pruned and of the super path
    """

    title: str
    axis: str
    word: str
    digits: int
    sign: int
    summary: Callable[[RecordedRun], Summary | None]
    at: Callable[[EpochMetrics], float | None]
    super: Callable[[EpochMetrics], float | None]

    def last(self, run: RecordedRun) -> float | None:
        """Return the value at the last epoch of a run."""
        found = self.summary(run)
        return found["last"] if found else None


ACCURACY = Measure(
    "Test accuracy", "test accuracy, %", "Accuracy", 2, 1,
    lambda run: run.summary, lambda epoch: epoch.top1, lambda epoch: epoch.top1_super,
)  # fmt: skip
LOSS = Measure(
    "Validation loss", "validation loss, nats per token", "Loss", 3, -1,
    lambda run: run.loss, lambda epoch: epoch.val_loss, lambda epoch: epoch.val_loss_super,
)  # fmt: skip


def measure_of(run: RecordedRun) -> Measure:
    """Return what a run is measured by."""
    return LOSS if run.text else ACCURACY


def measures_of(runs: Iterable[RecordedRun]) -> list[Measure]:
    """Return what runs are measured by, each once."""
    return list(dict.fromkeys(map(measure_of, runs)))
