"""The figures of a torture run: as a table, as JSON, and in docs/reliability.md (python tests/torture/figures.py)."""

from __future__ import annotations

import json
import platform
import re
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILE = ROOT / "build" / "torture.json"
MUTANTS = ROOT / "build" / "mutants.json"
PAGE = ROOT / "docs" / "reliability.md"
COLUMNS = ("fine", "refused", "lost", "silently wrong", "hang", "traceback", "leftover", "unclear")


def write(tallies: list[Any], seed: int, factor: float) -> None:
    """Write build/torture.json; attacks that were not run now keep their figures of the same seed and factor."""
    import safetensors
    import torch

    import dcil

    old = json.loads(FILE.read_text()) if FILE.exists() else {}
    same = (old.get("seed"), old.get("factor")) == (seed, factor)
    attacks = old["attacks"] if same else {}
    for tally in tallies:
        attacks[tally.name] = {"counts": dict(tally.counts), "seconds": tally.seconds, "faults": tally.faults}
    versions = {"dcil": dcil.__version__, "torch": torch.__version__, "safetensors": safetensors.__version__}
    versions["python"] = platform.python_version()
    date = datetime.now(timezone.utc).date().isoformat()
    FILE.parent.mkdir(exist_ok=True)
    record = {"date": date, "seed": seed, "factor": factor, "versions": versions, "attacks": attacks}
    FILE.write_text(json.dumps(record, indent=1))


def text() -> str:
    """Return the figures of the last run as a Markdown table."""
    record = json.loads(FILE.read_text())
    rows = [["attack", "cases", *COLUMNS]]
    for name, attack in record["attacks"].items():
        counts = attack["counts"]
        rows.append([name, str(sum(counts.values())), *(str(counts.get(column, 0)) for column in COLUMNS)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rows.insert(1, ["-" * width for width in widths])
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    seconds = sum(attack["seconds"] for attack in record["attacks"].values())
    lines += ["", f"{record['date']}, seed {record['seed']}, factor {record['factor']:g}, {seconds:.0f} s; {versions}."]
    if MUTANTS.exists():
        mutants = json.loads(MUTANTS.read_text())
        excused = len(mutants["excused"])
        lines += ["", f"Mutants of the core: {mutants['noticed']} of {mutants['mutants']} noticed by the tests; "
                  f"{excused} change nothing that a test could notice."]  # fmt: skip
    return "\n".join(lines)


def renew_page() -> None:
    """Put the figures of the last run into docs/reliability.md."""
    page = PAGE.read_text()
    block = f"<!-- figures -->\n\n{text()}\n\n<!-- end of figures -->"
    new, found = re.subn(r"<!-- figures -->.*?<!-- end of figures -->", lambda _: block, page, flags=re.S)
    if found != 1:
        raise SystemExit(f"{PAGE} must have one pair of figures markers, has {found}")
    PAGE.write_text(new)


if __name__ == "__main__":
    renew_page()
    sys.stdout.write(f"wrote {PAGE.relative_to(ROOT)}\n")
