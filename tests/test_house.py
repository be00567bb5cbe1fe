"""The house rules that a machine can hold: who imports whom, and how long things get."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "dcil"
#: In the order of the data's flow; a file imports what stands before it, never what stands after.
CORE = ["errors", "views", "schedule", "weight", "scope", "criteria", "granularity", "selection", "optimizer_state"]
CORE += ["method", "methods", "partition", "net"]
BATTERIES = ["models", "data", "runs", "tracing", "engine", "train", "integrations", "report"]
BATTERIES += ["reproduce", "runtime", "export", "bench", "cli"]
ORDER = [*CORE, *BATTERIES]
FILES = sorted(SRC.rglob("*.py"))


def part(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The parts of dcil that a file imports anywhere in it; names taken from dcil itself count as the core."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "dcil":
            found |= {alias.name if alias.name in ORDER else "net" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dcil."):
            found.add((node.module or "").split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("dcil.")}
    return found


@pytest.mark.parametrize("path", [f for f in FILES if part(f) in ORDER], ids=lambda f: str(f.relative_to(SRC)))
def test_imports_flow_one_way(path):
    place = ORDER.index(part(path))
    for name in imported(path) - {part(path)}:
        assert ORDER.index(name) < place, f"{part(path)} imports {name}"


def test_every_file_has_its_place():
    assert {part(f) for f in FILES} - {"__init__", "__main__"} <= set(ORDER)


@pytest.mark.parametrize("path", [f for f in FILES if part(f) in CORE], ids=lambda f: str(f.relative_to(SRC)))
def test_the_core_needs_torch_only_and_touches_nothing(path):
    tree = ast.parse(path.read_text())
    modules = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    modules |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    allowed = {
        "torch",
        "dcil",
        "__future__",
        "collections",
        "dataclasses",
        "typing",
        "difflib",
        "fnmatch",
        "copy",
        "os",
    }
    assert {m.split(".")[0] for m in modules} <= allowed | {"math", "warnings", "random", "itertools", "contextlib"}
    calls = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert not calls & {"open", "print", "input"}
    assert "manual_seed" not in path.read_text() or "Generator" in path.read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda f: str(f.relative_to(SRC)))
def test_short_enough_to_read_in_one_go(path):
    text = path.read_text()
    assert text.count("\n") <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            size = (node.end_lineno or 0) - node.lineno + 1
            assert size <= 45, f"{node.name} has {size} lines"


def test_someone_new_understands_dcil_from_450_lines():
    reading = ["views.py", "schedule.py", "methods/dcil.py", "net.py"]
    assert sum((SRC / name).read_text().count("\n") for name in reading) <= 450
