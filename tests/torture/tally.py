"""Verdicts on single cases, and their count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forks import Outcome, spread

FINE, REFUSED = "fine", "refused"
LOST, WRONG, HANG, TRACEBACK = "lost", "silently wrong", "hang", "traceback"
LEFTOVER, UNCLEAR = "leftover", "unclear"
FAULTS = (LOST, WRONG, HANG, TRACEBACK, LEFTOVER, UNCLEAR)
MEANING = {
    FINE: "same result as undisturbed, or harmless and done",
    REFUSED: "one line on standard error, exit code 1 or 2",
    LOST: "something that was there, or was finished, is gone",
    WRONG: "another result than undisturbed, and no word of it",
    HANG: "still running at the time limit",
    TRACEBACK: "a raw traceback or a crash",
    LEFTOVER: "files that are not part of the result",
    UNCLEAR: "refused, but not in one line with exit code 1 or 2",
}


@dataclass(frozen=True)
class Verdict:
    """What became of a case, and what tells so."""

    kind: str
    detail: str = ""


#: A case: its label, by which it can be found again, and what carries it out.
Case = tuple[str, Callable[[], Verdict]]


@dataclass
class Tally:
    """The verdicts of one attack."""

    name: str
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[dict[str, str]] = field(default_factory=list)

    def take(self, label: str, verdict: Verdict) -> None:
        self.counts[verdict.kind] += 1
        if verdict.kind in FAULTS:
            self.faults.append({"case": label, "kind": verdict.kind, "detail": verdict.detail})


def judge(name: str, cases: Sequence[Case]) -> Tally:
    """Carry out all cases of an attack."""
    tally = Tally(name)
    for (label, _), verdict in zip(cases, spread([work for _, work in cases]), strict=True):
        tally.take(label, verdict)
    return tally


def of_outcome(outcome: Outcome) -> Verdict:
    """Judge how a command ended: done, refused in one line, or in a way that it must not end."""
    lines = [line for line in outcome.err.splitlines() if line.strip()]
    last = lines[-1][:300] if lines else ""
    if outcome.hung:
        return Verdict(HANG)
    if outcome.code is None:
        return Verdict(TRACEBACK, f"ended by signal {outcome.signal}: {last}")
    if "Traceback (most recent call last)" in outcome.err:
        return Verdict(TRACEBACK, last)
    if outcome.code == 0:
        return Verdict(FINE)
    if outcome.code in (1, 2) and len(lines) == 1 and last.startswith("dcil: "):
        return Verdict(REFUSED, last)
    return Verdict(UNCLEAR, f"exit code {outcome.code}, {len(lines)} lines: {last}")
