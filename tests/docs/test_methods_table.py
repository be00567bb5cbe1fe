"""The table of methods on digits is that of the recorded values."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_is_that_of_the_recorded_runs():
    runs = json.loads((ROOT / "benchmarks" / "digits-methods.json").read_text())["runs"]
    rows = re.findall(r"^\| `(\w+)`(?: \(0 %\))? \| (\d.*) \|$", (ROOT / "docs" / "methods.md").read_text(), re.M)
    assert {name for name, _ in rows} == {run["method"] for run in runs}
    for name, cells in rows:
        wanted = []
        for sparsity in sorted({run["sparsity"] for run in runs if run["method"] == name}):
            for key in ("top1_last", "top1_best"):
                found = [run[key] for run in runs if (run["method"], run["sparsity"]) == (name, sparsity)]
                assert len(found) == 3
                wanted.append(f"{statistics.mean(found):.2f} ± {statistics.stdev(found):.2f}")
        assert [cell.strip() for cell in cells.split("|") if cell.strip()] == wanted, name
