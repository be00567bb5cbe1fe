"""The gallery: every example runs as a plain script, draws something, and is written as sphinx-gallery reads it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GALLERY = Path(__file__).parents[2] / "docs" / "gallery"
EXAMPLES = sorted(GALLERY.glob("plot_*.py"))
every = pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)

#: Counts the figures that a script shows, and refuses a figure without anything in it.
RUNNER = """
import runpy, sys
import matplotlib.pyplot as plt
shown = 0
def show():
    global shown
    for number in plt.get_fignums():
        figure = plt.figure(number)
        assert figure.axes and all(axes.has_data() for axes in figure.axes), f"figure {number} is empty"
        figure.canvas.draw()
        shown += 1
    plt.close("all")
plt.show = show
runpy.run_path(sys.argv[1], run_name="__main__")
show()
print("figures:", shown)
"""


@every
def test_an_example_has_a_title_and_cells(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    title, line, *_ = (ast.get_docstring(ast.parse(text)) or "").splitlines()
    assert line == "=" * len(title)
    assert len(re.findall(r"^# %%$", text, re.M)) >= 3


@every
def test_prose_has_no_results_in_it(script: Path) -> None:
    """Accuracies, times and sizes are printed by the run itself."""
    cells = re.findall(r"^# %%\n((?:#.*\n)+)", script.read_text(encoding="utf-8"), re.M)
    assert re.findall(r"\d+\.\d+ (?:%|ms|s|KiB)|\d+ (?:points|ms|KiB)", "".join(cells)) in ([], ["98.5 %"])


@pytest.mark.slow
@every
def test_an_example_runs_and_draws(script: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-W", "error::UserWarning:dcil", "-c", RUNNER, str(script)]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=tmp_path, env=os.environ | {"MPLBACKEND": "Agg"}
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.rsplit("figures: ", 1)[1]) >= 1
    assert not list(tmp_path.iterdir())
