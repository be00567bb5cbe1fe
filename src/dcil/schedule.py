"""Schedules: after which steps the masks are updated, and how sparse they are then."""

from __future__ import annotations

import random
from dataclasses import dataclass

from dcil.errors import UserError, shown
from dcil.validation import MOST, Validated, is_a, plain


@dataclass(frozen=True)
class Timeline:
    """The times of a method, in optimizer steps: what a schedule is laid along.

    sparsity      final sparsity
    target        step at which it is reached
    begin         step from which on it grows
    initial       the sparsity until then
    hold          steps for which a growing sparsity keeps its value: those of an epoch, or 1
    every         F: steps from one mask update to the next
    first, last   steps between which these regular updates happen, both included
    extra         further steps after which the masks are updated
    steps         steps of the training
    seed          of random choices
    """

    sparsity: float
    target: int
    begin: int
    initial: float
    hold: int
    every: int
    first: int
    last: int
    extra: tuple[int, ...]
    steps: int
    seed: int


@dataclass(frozen=True)
class Phase:
    """A stretch of training. ``start`` is where in the learning-rate schedule it begins, None a constant rate."""

    name: str
    steps: int
    start: int | None = 0


def checked_step(step: int) -> int:
    """Return the step; refuse what is no number."""
    if not is_a("float", found := plain(step)):
        raise UserError(f"the step must be a number, got {shown(step)}")
    return int(found)


@dataclass(frozen=True)
class Schedule(Validated):
    """Decides when masks are updated (``due``) and how sparse they become (``sparsity``)."""

    def sparsity(self, step: int, time: Timeline) -> float:
        """The sparsity after ``step`` optimizer steps."""
        raise NotImplementedError("abstract: a schedule defines sparsity")

    @property
    def peak(self) -> float:
        """The largest sparsity that it asks for on its own account, not the method's."""
        return 0.0

    @property
    def needs_extra(self) -> bool:
        """Whether it prunes nothing on a timeline without ``extra`` steps."""
        return False

    @property
    def alternates(self) -> bool:
        """Whether every second of the ``extra`` steps brings all weights back, so that an even number ends dense."""
        return False

    def due(self, step: int, time: Timeline) -> bool:
        """Whether the masks are updated after ``step`` optimizer steps."""
        return step in time.extra or (step % time.every == 0 and time.first <= step <= time.last)


@dataclass(frozen=True)
class Cubic(Schedule):
    """Grow the sparsity fast at first and slowly at the end (Zhu & Gupta 2017; Kim et al. 2022, Eq. 1).

        s(t) = final + (initial - final) * (1 - (t - begin) / (steps - begin))^3        for begin <= t <= steps

    ``period`` holds the value for that many steps: the authors evaluate t once per epoch
    (``period`` = steps in an epoch), ``period=1`` is the smooth curve. What is None is the method's:
    its sparsity, target step and epoch. With ``final`` and ``steps`` given, the curve can be called on its own.
    """

    final: float | None = None
    steps: int | None = None
    period: int | None = None
    initial: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("final", self.final is None or 0 <= self.final < 1, ">= 0 and < 1", "None is the method's")
        self.require("initial", 0 <= self.initial < 1, ">= 0 and < 1")
        for name in ("steps", "period"):
            value = getattr(self, name)
            self.require(name, value is None or 1 <= value <= MOST, f"from 1 to {MOST}", "None is the method's")

    @property
    def peak(self) -> float:
        return max(self.final or 0.0, self.initial)

    def sparsity(self, step: int, time: Timeline) -> float:
        final = time.sparsity if self.final is None else self.final
        steps, period = self.steps or time.target, self.period or time.hold
        return self._curve(step, self.initial or time.initial, final, time.begin, steps, period)

    def __call__(self, step: int) -> float:
        if self.final is None or self.steps is None:
            raise UserError(f"Cubic: final and steps must be given to call it, got {self}")
        return self._curve(checked_step(step), self.initial, self.final, 0, self.steps, self.period or 1)

    @staticmethod
    def _curve(step: int, initial: float, final: float, begin: int, steps: int, period: int) -> float:
        if step >= steps:
            return final
        if step <= begin:  # also where both are the same step
            return initial
        left = 1.0 - (step // period * period - begin) / (steps - begin)
        if left >= 1.0:
            return initial
        # A product and not a power: each rounding is monotone, so the curve never steps back by an ulp.
        return final + (initial - final) * (left * left * left)


@dataclass(frozen=True)
class Constant(Schedule):
    """Prune to the final sparsity at the first update and stay there."""

    def sparsity(self, step: int, time: Timeline) -> float:
        return time.sparsity if step >= time.first else time.initial


@dataclass(frozen=True)
class AtSteps(Schedule):
    """Prune at the timeline's ``extra`` steps alone, each time by the same fraction of what is left.

    After r of R prunings:   density = (1 - initial) * ((1 - sparsity) / (1 - initial))^(r / R)
    """

    @property
    def needs_extra(self) -> bool:
        return True

    def sparsity(self, step: int, time: Timeline) -> float:
        done, rounds = sum(step >= at for at in time.extra), len(time.extra)
        dense = 1 - time.initial
        return time.sparsity if done == rounds else float(1 - dense * ((1 - time.sparsity) / dense) ** (done / rounds))

    def due(self, step: int, time: Timeline) -> bool:
        return step in time.extra


@dataclass(frozen=True)
class Alternating(Schedule):
    """Prune to the final sparsity and bring every weight back in turn, at the timeline's ``extra`` steps alone."""

    @property
    def needs_extra(self) -> bool:
        return True

    @property
    def alternates(self) -> bool:
        return True

    def sparsity(self, step: int, time: Timeline) -> float:
        done = sum(at <= step for at in time.extra)
        return time.sparsity if done % 2 else 0.0 if done else time.initial

    def due(self, step: int, time: Timeline) -> bool:
        return step in time.extra


@dataclass(frozen=True)
class Never(Schedule):
    """Leave the masks as they are: dense training."""

    def sparsity(self, step: int, time: Timeline) -> float:
        return time.sparsity

    def due(self, step: int, time: Timeline) -> bool:
        return False


@dataclass(frozen=True)
class Stretched(Constant):
    """Double the steps between regular updates at each of the ``doublings``, given as parts of the training."""

    doublings: tuple[float, ...] = (0.125, 0.4, 0.7)

    def __post_init__(self) -> None:
        super().__post_init__()
        known = isinstance(self.doublings, tuple) and len(self.doublings) <= 50
        known = known and all(is_a("float", part) and 0 <= part <= 1 for part in self.doublings)
        self.require("doublings", known, "a tuple of parts of the training", "each from 0 to 1, at most 50")

    def due(self, step: int, time: Timeline) -> bool:
        factor = 2 ** sum(step >= part * time.steps for part in self.doublings)
        return step in time.extra or (super().due(step, time) and step % (time.every * factor) == 0)


@dataclass(frozen=True)
class Thinned(Schedule):
    """Keep a regular update of ``schedule`` with probability (1 + gamma * steps since the first)^-power.

    The first update and the ``extra`` ones always happen.
    """

    schedule: Schedule = Constant()
    gamma: float = 1e-3
    power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        known = isinstance(self.schedule, Schedule) and type(self.schedule) is not Schedule
        self.require("schedule", known, "a kind of Schedule")
        for name in ("gamma", "power"):
            self.require(name, getattr(self, name) >= 0, ">= 0", "0 keeps every update")

    @property
    def peak(self) -> float:
        return self.schedule.peak

    @property
    def needs_extra(self) -> bool:
        return self.schedule.needs_extra

    @property
    def alternates(self) -> bool:
        return self.schedule.alternates

    def sparsity(self, step: int, time: Timeline) -> float:
        return self.schedule.sparsity(step, time)

    def due(self, step: int, time: Timeline) -> bool:
        if step in time.extra or not self.schedule.due(step, time):
            return step in time.extra
        # A pure function of the seed and the step: every process and every resumed run decides alike.
        chance = (1 + self.gamma * (step - time.first)) ** -self.power
        return step == time.first or random.Random(f"{time.seed} {step}").random() < chance
