"""How sparse at a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cubic:
    """Sparsity that grows fast at first and slowly at the end (Zhu & Gupta 2017; Kim et al. 2022, Eq. 1).

        s(t) = final + (initial - final) * (1 - t / steps)^3        for 0 <= t <= steps, then final

    ``period`` holds the value for that many steps: the authors evaluate t once per epoch
    (``period`` = steps in an epoch), ``period=1`` is the smooth curve.
    """

    final: float
    steps: int
    period: int = 1
    initial: float = 0.0

    def __call__(self, step: int) -> float:
        if step >= self.steps:
            return self.final
        left = 1.0 - step // self.period * self.period / self.steps
        if left >= 1.0:
            return self.initial
        # A product and not a power: each rounding is monotone, so the curve never steps back by an ulp.
        return self.final + (self.initial - self.final) * (left * left * left)
