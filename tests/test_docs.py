"""The documents: links lead somewhere, examples run, versions agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import dcil
from dcil import data, export
from dcil.cli import COMMANDS, main

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    f for folder in (".", "docs", "benchmarks", "packages/dcil-runtime") for f in (ROOT / folder).glob("*.md")
)


@pytest.mark.parametrize("page", PAGES, ids=lambda f: str(f.relative_to(ROOT)))
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text()
    assert [
        f.name for f in (ROOT / "docs").glob("*.md") if f.name not in ("index.md",) and f"({f.name})" not in index
    ] == []


def test_the_readme_is_short_and_names_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 120
    assert "make demo" in text and "make test" in text and "pip install" in text


@pytest.mark.parametrize("page", ["README.md", "docs/training.md"])
def test_the_five_lines_run_as_printed(page):
    (code,) = re.findall(r"```python\n(import dcil\n\nnet = .*?)```", (ROOT / page).read_text(), re.S)
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 3))
    loader = [(torch.randn(5, 6), torch.randint(3, (5,))) for _ in range(60)]
    scope = {"torch": torch, "model": model, "loader": loader}
    exec(compile(code.replace("60_000", "60").replace("lr=0.2", "lr=0.01"), page, "exec"), scope)
    sparse = scope["sparse"]
    assert type(sparse) is torch.nn.Sequential and sparse.state_dict().keys() == model.state_dict().keys()
    assert int((sparse[0].weight == 0).sum()) == int(0.95 * 72)


def test_versions_agree():
    assert f"\nversion: {dcil.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {dcil.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def rows(page: str, header: str) -> set[str]:
    """The names in code style in the first column of the table that begins with ``header``."""
    (table,) = re.findall(rf"^{re.escape(header)}.*\n(?:\|.*\n)+", (ROOT / page).read_text(), re.M)
    firsts = [line.split("|")[1] for line in table.splitlines()[2:]]
    return set(re.findall(r"`([^`]+)`", " ".join(firsts)))


def test_tables_list_what_there_is():
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text().split("[project.optional-dep")[1], re.M)
    assert rows("docs/install.md", "| extra |") == set(extras[: extras.index("dev")])
    assert rows("docs/methods.md", "| name | method |") == set(dcil.METHODS)
    hooks = [hook.split("(")[0] for hook in rows("docs/methods.md", "| hook |")]
    assert [hook for hook in hooks if not hasattr(dcil.Method, hook)] == []
    assert rows("docs/export.md", "| format |") == {*export.FORMATS, *export.PROGRAMS}
    assert rows("docs/training.md", "| name | what it is |") == set(data.names())


def test_versions_of_formats_are_the_codes():
    text = (ROOT / "docs" / "policy.md").read_text()
    code = "".join(f.read_text() for f in (ROOT / "src" / "dcil").rglob("*.py"))
    promised = re.findall(r"`(dcil [\w:]+ \d+)`", text)
    assert len(promised) == 4 and all(f'"{name}"' in code for name in promised)


def commands() -> list[str]:
    lines = "\n".join(page.read_text() for page in PAGES)
    found = re.findall(r"^ *(?:torchrun \S+ \S+ -m )?(dcil [a-z]+ .*?)(?:  +#.*)?$", lines, re.M)
    return [part for line in found if line.split()[1] in COMMANDS for part in line.split("; ")]


@pytest.mark.parametrize("command", commands())
def test_commands_have_the_flags_that_the_pages_use(command, capsys):
    """Held against --help: nothing is trained."""
    words = command.split()[1:]
    start = words[: 2 if words[0] == "bench" else 1]
    assert main([*start, "--help"]) == 0
    known = capsys.readouterr().out
    assert [w for w in words if w.startswith("--") and not re.search(rf"{w}\b", known)] == []
