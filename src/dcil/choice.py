"""Choice: weights or modules of a network, chosen by name patterns or by a function of the user's."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence

from torch import nn

from dcil.errors import UserError, described, unknown

#: Name patterns (``layer1.*``), or a predicate on a name and its module.
Choice = str | Sequence[str] | Callable[[str, nn.Module], bool]
PATTERNS = "a name pattern, a list of them or a function (name, module) -> bool"


def listed(choice: object, what: str, must: str = PATTERNS) -> list[str]:
    """One name or several as a list."""
    names = [choice] if isinstance(choice, str) else choice
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{what} must be {must}, got {described(choice)}")
    return list(names)


def chooses(choice: Callable[[str, nn.Module], bool], what: str, name: str, module: nn.Module) -> bool:
    """Whether the user's predicate chooses the module."""
    try:
        found = choice(name, module)
    except Exception as error:
        got = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"{what} must be {PATTERNS}, got one that raised for {name!r}: {got}") from error
    if type(found).__name__ not in ("bool", "bool_"):  # the second: numpy's
        raise UserError(f"{what} must be {PATTERNS}, got {described(found)} for {name!r} (bool(…) makes it one)")
    return bool(found)


def matching(
    modules: dict[str, nn.Module],
    choice: Choice,
    what: str,
    aliases: Callable[[str], tuple[str, ...]] = lambda name: (name,),
) -> dict[str, nn.Module]:
    """Choose by name pattern or predicate; a pattern that matches nothing is an error."""
    if callable(choice) and not isinstance(choice, (type, nn.Module)):
        return {name: module for name, module in modules.items() if name and chooses(choice, what, name, module)}
    found: dict[str, nn.Module] = {}
    for pattern in listed(choice, what):
        hits = {n: m for n, m in modules.items() if n and any(fnmatch.fnmatchcase(a, pattern) for a in aliases(n))}
        if not hits:
            raise unknown(f"name or pattern in {what}=", pattern, (n for n in modules if n))
        found.update(hits)
    return found
