"""The house rules that a machine can hold: who imports whom, what is private, how long things get."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "dcil"
#: In the order of the data's flow: a file imports what stands before it, never what stands after.
KERNEL = ["errors", "validation", "views", "gradient_rules", "schedule", "weight", "scope", "sharding", "criteria"]
KERNEL += ["granularity", "selection", "optimizer_state", "batched_views", "batch_share", "task", "mutual_kl"]
KERNEL += ["distillation", "declared", "method", "methods", "naming", "identity", "loading", "wiring", "attributes"]
KERNEL += ["checks", "finite", "update"]
KERNEL += ["choice", "attachment", "partition", "inspection", "masks", "fsdp", "copies", "bindings", "paths"]
KERNEL += ["counted", "net", "ema"]
PACKAGES = ["models", "data", "runs", "tracing", "engine", "train", "integrations", "report", "reproduce"]
PACKAGES += ["runtime", "export", "bench", "cli"]
ORDER = [*KERNEL, *PACKAGES]
FILES = sorted(SRC.rglob("*.py"))
PRIVATE = ("dcil.engine.cuda", "dcil.engine.kernels")
#: Functions that may be longer than 40 lines, with the reason.
LONG_FUNCTIONS = {"export/writer.py:export": "half of it is the docstring of a public function"}


def every(files: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", files, ids=lambda path: str(path.relative_to(SRC)))


def part(path: Path) -> str:
    """The package, or the kernel's module, that a file belongs to."""
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Dotted names of everything that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def parts_imported(path: Path) -> set[str]:
    """The parts of dcil that a file imports; names taken from dcil itself count as the kernel's last module."""
    names = [name.split(".")[1] for name in imports(path) if name.startswith("dcil.")]
    return {name if name in ORDER else "net" for name in names}


@every([file for file in FILES if part(file) in ORDER])
def test_imports_flow_one_way(path):
    place = ORDER.index(part(path))
    for name in parts_imported(path) - {part(path)}:
        assert ORDER.index(name) < place, f"{part(path)} imports {name}"


def test_the_top_of_the_package_is_the_kernel_and_nothing_else():
    assert {file.stem for file in SRC.glob("*.py")} - {"__init__", "__main__", "startup"} == set(KERNEL) - {"methods"}
    assert {file.name for file in SRC.iterdir() if file.is_dir() and any(file.glob("*.py"))} <= {"methods", *PACKAGES}


@every([file for file in FILES if part(file) == "runs"])
def test_run_folders_know_the_kernel_only(path):
    assert parts_imported(path) <= {"runs", *KERNEL}


@every([file for file in FILES if part(file) != "engine"])
def test_the_engine_keeps_its_insides_private(path):
    assert not [name for name in imports(path) if name.startswith(PRIVATE)]


@every([file for file in FILES if part(file) == "engine"])
def test_the_engine_names_no_method(path):
    names = {name.rsplit(".", 1)[-1] for name in imports(path) if name.startswith("dcil.")}
    assert not names & {"DCIL", "DPF", "METHODS"}
    assert "dcil.methods" not in path.read_text()


@every([file for file in FILES if part(file) in KERNEL])
def test_the_kernel_needs_torch_only_and_touches_nothing(path):
    tree = ast.parse(path.read_text())
    modules = {name.split(".")[0] for name in imports(path)}
    standard = {"__future__", "collections", "dataclasses", "typing", "difflib", "fnmatch", "copy", "math", "warnings"}
    standard |= {"random", "itertools", "operator", "contextlib", "functools", "re", "struct", "sys", "zlib", "weakref"}
    assert modules <= {"torch", "dcil"} | standard
    calls = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert not calls & {"open", "print", "input"}
    assert "manual_seed" not in path.read_text() or "Generator" in path.read_text()


@every(FILES)
def test_short_enough_to_read_in_one_go(path):
    text = path.read_text()
    assert text.count("\n") <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and f"{path.relative_to(SRC)}:{node.name}" not in LONG_FUNCTIONS:
            size = (node.end_lineno or 0) - node.lineno + 1
            assert size <= 40, f"{node.name} has {size} lines"


def test_no_two_modules_share_a_name():
    """But commands, named as they are typed, private kernels, and what is exported or timed under the same name."""
    names = [file.stem for file in FILES if part(file) != "cli" and file.parent.name != "kernels"]
    repeated = {name for name in names if names.count(name) > 1} - {"__init__"}
    assert repeated <= {"cifar", "batches", "cpu", "semi"}


def test_the_source_stays_small():
    assert sum(file.read_text().count("\n") for file in FILES) <= 33_000


def test_someone_new_understands_dcil_from_450_lines():
    """The reading order of ARCHITECTURE.md, without empty lines."""
    texts = [(ROOT / "examples" / "dcil_in_one_file.py").read_text()]
    texts += [(SRC / name).read_text() for name in ("views.py", "methods/dcil.py", "paths.py")]
    for name, title in (("method.py", "how a mask is decided"), ("net.py", "training")):
        section = re.search(rf"# -- {title} -.*?(?=    # -- )", (SRC / name).read_text(), flags=re.S)
        assert section is not None
        texts.append(section[0])
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    assert len(lines) <= 450
