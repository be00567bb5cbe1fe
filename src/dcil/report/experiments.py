"""Experiments: runs that differ only in their seed; figures show one as a line with a band, the table as a mean."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dcil.runs.read import RecordedRun
from dcil.train.config import EARLIER

# Fields of a config, and of the method in it, that do not make another experiment.
SEED_AND_PATHS = frozenset({"seed", "out", "resume", "data_dir"})


@dataclass(frozen=True)
class Experiment:
    """Runs that differ only in their seed, one per seed; a run that is unfinished or repeated stands alone."""

    label: str
    runs: tuple[RecordedRun, ...]

    @property
    def first(self) -> RecordedRun:
        return self.runs[0]

    def mean(self, value: Callable[[RecordedRun], float | None]) -> float | None:
        """Return the mean of a value over the runs; None where a run has none."""
        return self.spread(value)[0]

    def spread(self, value: Callable[[RecordedRun], float | None]) -> tuple[float | None, float]:
        """Return mean and sample standard deviation of a value; the deviation of one run is 0."""
        values = [found for run in self.runs if (found := value(run)) is not None]
        if len(values) < len(self.runs):
            return None, 0.0
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def experiments(runs: Sequence[RecordedRun]) -> list[Experiment]:
    """Group complete runs by their settings, in the order in which the groups appear."""
    groups: dict[str, dict[int, RecordedRun]] = {}
    found: list[Experiment | str] = []
    for run in runs:
        key = settings(run)
        group = groups.setdefault(key, {})
        if not run.complete or run.seed in group:
            found.append(Experiment(run.label, (run,)))
        else:
            if not group:
                found.append(key)
            group[run.seed] = run
    grouped = [_summed(list(groups[one].values())) if isinstance(one, str) else one for one in found]
    names = Counter(one.label for one in grouped)

    def told_apart(one: Experiment) -> Experiment:
        return one if names[one.label] == 1 else replace(one, label=f"{one.label}: {one.first.label} …")

    return [told_apart(one) for one in grouped]


def _summed(runs: Sequence[RecordedRun]) -> Experiment:
    first = runs[0]
    if len(runs) == 1:
        return Experiment(first.label, (first,))
    sparsity = "" if first.dense or first.sparsity is None else f" {100 * first.sparsity:.4g} %"
    return Experiment(f"{method_name(first)}{sparsity}, {len(runs)} seeds", tuple(runs))


def method_name(run: RecordedRun) -> str:
    """Return the method, with its granularity where that is not single weights."""
    return run.method if run.granularity == "weight" else f"{run.method} {run.granularity}"


def settings(run: RecordedRun, without: frozenset[str] = frozenset()) -> str:
    """Return the settings of a run besides its seed, and besides the fields ``without``, as text to compare."""
    left_out = SEED_AND_PATHS | without

    def kept(record: Mapping[str, object]) -> dict[str, object]:
        return {key: value for key, value in record.items() if key not in left_out}

    config = kept(EARLIER | dict(run.config))
    method = config.get("method")
    return json.dumps(config | {"method": kept(method)} if isinstance(method, Mapping) else config, sort_keys=True)
