"""Numbers as the report writes them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from dcil.reproduce.paper import Row

NONE = "\N{EN DASH}"
NOT_RUN = "not run"


def number(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}".replace("-", "\N{MINUS SIGN}")


def signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "\N{MINUS SIGN}")


def spread(values: Sequence[float], digits: int = 2) -> str:
    """mean ± sample standard deviation, the mean alone for one value, nothing for none."""
    if not values:
        return ""
    middle = number(statistics.fmean(values), digits)
    return f"{middle} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else middle


def interval(row: Row) -> str:
    """A number of the paper."""
    if row.mean is None:
        return "does not converge"
    digits = digits_of(row.metric)
    middle = signed(row.mean) if row.metric.endswith("_diff") else number(row.mean, digits)
    return middle if row.std is None else f"{middle} ± {row.std:.{digits}f}"


def digits_of(quantity: str) -> int:
    """As many as the paper prints."""
    return 3 if quantity.startswith("std") else 2


def percent(sparsity: float) -> str:
    return f"{100 * sparsity:g} %" if sparsity else NONE
