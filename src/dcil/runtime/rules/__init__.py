"""A rule for every ATen operator that a plan can hold: what it adds to the plan, and where its result lies."""

from __future__ import annotations

from dcil.runtime.rules import attention, embedding, moves, norms, pointwise, weighted, windows
from dcil.runtime.rules.rule import Rule

RULES: dict[str, Rule] = {
    **weighted.RULES,
    **pointwise.RULES,
    **norms.RULES,
    **windows.RULES,
    **moves.RULES,
    **attention.RULES,
    **embedding.RULES,
}
