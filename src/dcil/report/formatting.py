"""Number formats shared by all tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

NONE = "\N{EN DASH}"
NOT_RUN = "not run"


def number(value: float, digits: int = 2) -> str:
    """Format a number with a typographic minus sign."""
    return f"{value:.{digits}f}".replace("-", "\N{MINUS SIGN}")


def signed(value: float, digits: int = 2) -> str:
    """Format a difference: always with its sign."""
    return f"{value:+.{digits}f}".replace("-", "\N{MINUS SIGN}")


def plus_minus(mean: float, std: float | None, digits: int = 2) -> str:
    """Format ``mean ± std``, or the mean alone where there is no deviation."""
    return number(mean, digits) if std is None else f"{number(mean, digits)} ± {std:.{digits}f}"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Format mean ± sample standard deviation: the mean alone for one value, the empty string for none."""
    if not values:
        return ""
    return plus_minus(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, digits)


def bits_per_byte(loss: float, text: Mapping[str, Any]) -> float:
    """Convert nats per token of a run's ``text``, as config.json describes it, to bits per byte of that text."""
    return float(loss / math.log(2) / text["bytes_per_token"])


def duration(seconds: float) -> str:
    """Format seconds in at most two units: ``8.3 s``, ``4 min 05 s``, ``2 h 07 min``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def count(value: float) -> str:
    """Format a count in three digits: ``640``, ``1.25 M``, ``41.0 G``."""
    return _scaled(value, 1000, ("", "k", "M", "G", "T"))


def file_size(value: float) -> str:
    """Format bytes in three digits: ``640 B``, ``12.5 KiB``, ``1.07 MiB``."""
    return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    power = 0
    while value >= 999.5 and power < len(units) - 1:
        value, power = value / base, power + 1
    text = f"{value:#.3g}".rstrip(".") if power else f"{value:.0f}"
    return f"{text} {units[power]}".rstrip()
