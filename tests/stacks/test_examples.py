"""The examples run as they are, and have as many lines of dcil as docs/stacks.md says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: What marks a line as one that a training without pruning does not have.
OURS = re.compile(r"dcil\.SparseNet\(|SparseModel\(|SparseTrainer\(|SparsityCallback\(|\.attach\(|\.loss\((?!\))")


def table() -> dict[str, int]:
    """Lines added by example, as the page has them."""
    page = (ROOT / "docs" / "stacks.md").read_text()
    return {name: int(lines) for lines, name in re.findall(r"^\|.*\| (\d) \| \[(\w+)\.py\]", page, re.M)}


def test_the_page_counts_every_stack():
    assert table() == {
        "plain_loop": 3,
        "lightning_module": 2,
        "accelerate_loop": 2,
        "huggingface_trainer": 1,
        "timm_script": 3,
    }


@pytest.mark.parametrize("name", table())
def test_the_lines_added_are_marked_and_as_many_as_the_page_says(name):
    lines = (ROOT / "examples" / f"{name}.py").read_text().splitlines()
    marked = [line for line in lines if line.endswith("# dcil")]
    assert len(marked) == table()[name]
    code = [line for line in lines if not line.startswith(("import ", "from "))]
    assert [line for line in code if OURS.search(line) and line not in marked] == []


@pytest.mark.parametrize(("name", "steps"), [("plain_loop", 300), ("lightning_module", 300), ("timm_script", 300)])
@pytest.mark.filterwarnings("ignore")
def test_the_example_runs_and_ends_sparse_and_accurate(name, steps, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    last = capsys.readouterr().out.strip().splitlines()[-1]
    (found,) = re.findall(r"^(\d+) steps, sparsity ([\d.]+), accuracy ([\d.]+) %$", last)
    assert int(found[0]) == steps and float(found[1]) == 0.9 and float(found[2]) > 85
