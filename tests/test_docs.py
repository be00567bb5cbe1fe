"""The documents: links lead somewhere, examples run, versions agree."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import dcil
import dcil_runtime
from dcil import data, export
from dcil.cli import COMMANDS, main

ROOT = Path(__file__).parents[1]
FOLDERS = (".", "docs", "docs/guides", "docs/project", "benchmarks", "packages/dcil-runtime")
PAGES = sorted(f for folder in FOLDERS for f in (ROOT / folder).glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda f: str(f.relative_to(ROOT)))
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_every_page_is_in_the_index():
    docs = ROOT / "docs"
    index = (docs / "index.md").read_text()
    pages = [str(f.relative_to(docs)) for folder in (".", "guides", "project") for f in (docs / folder).glob("*.md")]
    assert [page for page in pages if page != "index.md" and f"({page})" not in index] == []
    named = [
        re.sub(r".*<(.*)>$", r"\1", line) for line in re.sub(r"(?s)```\{toctree\}|:\w+:.*?\n", "", index).splitlines()
    ]
    assert [page for page in pages if page != "index.md" and page.removesuffix(".md") not in named] == []  # the sidebar


def python_blocks(page: str) -> list[str]:
    """The Python code blocks of a page, but for those that a comment before them excepts."""
    text = re.sub(r"<!-- needs .*? -->\n```python\n.*?```", "", (ROOT / page).read_text(), flags=re.S)
    return re.findall(r"```python\n(.*?)```", text, re.S)


def run_blocks(page: str, scope: dict[str, Any], *changes: tuple[str, str]) -> dict[str, Any]:
    """Run the page's code blocks one after the other, as a reader would in a notebook."""
    for code in python_blocks(page):
        for old, new in changes:
            code = code.replace(old, new)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a few steps reach no sparsity, which is announced
            exec(compile(code, page, "exec"), scope)
    return scope


def tiny_network() -> torch.nn.Module:
    """The network of the start page, narrow."""
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def reader_scope() -> dict[str, Any]:
    """What the guides assume: a network, data, the number of epochs, and a pruned network."""
    torch.manual_seed(0)
    loader = [(torch.randn(8, 1, 8, 8), torch.randint(10, (8,))) for _ in range(4)]
    sparse = tiny_network().eval()
    sparse[3].weight.data[torch.rand_like(sparse[3].weight) < 0.9] = 0
    known = {"torch": torch, "dcil": dcil, "build": tiny_network, "model": tiny_network(), "sparse": sparse}
    return {**known, "loader": loader, "epochs": 8, "steps": 32, "x": loader[0][0], "y": loader[0][1]}


def test_the_start_page_runs(tmp_path, monkeypatch):
    """On a fraction of the data; the browser test runs what is copied from the page as it is."""
    monkeypatch.chdir(tmp_path)
    scope = run_blocks("docs/start.md", {}, ("EPOCHS = 10", "EPOCHS = 2"), ("x[:1500], y[:1500]", "x[:300], y[:300]"))
    assert abs(scope["net"].sparsity - 0.9) < 1e-4
    assert type(scope["sparse"]) is torch.nn.Sequential and (tmp_path / "sparse.pt").exists()


@pytest.mark.parametrize("guide", ["loop", "finetune", "cpu", "small", "filters", "nm", "transformers"])
def test_guides_run(guide, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(f"docs/guides/{guide}.md", reader_scope())


def test_every_public_name_is_documented_with_an_example_that_runs(tmp_path, monkeypatch, capsys):
    text = (ROOT / "docs" / "api.md").read_text()
    sections = dict(re.findall(r"(?m)^### (\w+)\n(.*?)(?=^##|\Z)", text, re.S | re.M))
    assert set(sections) == set(dcil.__all__)
    for name, section in sections.items():
        (example,) = re.findall(r"```python\n(.*?)```", section, re.S)
        assert name in example, f"{name} is not in its example"
        assert name == "METHODS" or f":: dcil.{name}\n" in section
    documented = set(re.findall(r"^\.\. auto\w+:: (dcil\S+)", text, re.M))
    for module in (export, dcil_runtime):
        values = {name for name in module.__all__ if isinstance(getattr(module, name), dict)}
        assert {f"{module.__name__}.{name}" for name in set(module.__all__) - values} <= documented
        assert all(name in text for name in values)
    monkeypatch.chdir(tmp_path)
    run_blocks("docs/api.md", {"__name__": "examples"})


def test_lines_for_those_who_come_from_other_tools_run(capsys):
    """Every line of code in the right column of every table."""
    tables = re.split(r"(?m)^## ", (ROOT / "docs" / "coming-from.md").read_text())[1:]
    assert len(tables) == 5
    lines = 0
    for table in tables:
        scope = reader_scope()
        scope["mask"] = torch.rand_like(scope["model"][3].weight) < 0.5
        cells = [re.split(r"(?<!\\)\|", row)[2] for row in table.splitlines() if row.startswith("|")][2:]
        for code in re.findall(r"`([^`]+)`", " ".join(cells)):
            words = code.split()
            if words[0] == "dcil" or not re.search(r"[=(\[]", code):  # a command, or a name that is mentioned
                continue
            if code == "optimizer.step()":
                scope["net"].loss(scope["net"](scope["x"]), scope["y"]).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(compile(code, "coming-from.md", "exec"), scope)
            lines += 1
    assert lines >= 40


def test_numbers_about_methods_are_measured():
    """Every number with decimals on these pages stands in a measured table, or is computed in one."""
    sources = ["docs/results.md", "docs/speed.md", "docs/export.md", "benchmarks/NOTES.md", "benchmarks/CPU.md"]
    measured = "".join((ROOT / source).read_text() for source in sources)
    for page in ("docs/which.md", "docs/faq.md", "docs/guides/cpu.md", "docs/guides/small.md"):
        prose = re.sub(r"```.*?```|`[^`]*`", "", (ROOT / page).read_text(), flags=re.S)
        numbers = set(re.findall(r"(?<![\d.])\d+\.\d+(?![\d.])", prose))
        missing = {n for n in numbers if not re.search(rf"(?<![\d.]){re.escape(n)}", measured)}
        assert missing == set(), page


def test_pictures_are_what_the_script_draws(tmp_path):
    path = ROOT / "docs" / "pictures" / "draw.py"
    scope: dict[str, Any] = {"__name__": "draw", "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    scope["HERE"] = tmp_path
    scope["main"]()
    drawn = {f.name: f.read_text() for f in tmp_path.glob("*.svg")}
    assert drawn == {f.name: f.read_text() for f in path.parent.glob("*.svg")}


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
    assert len(promised) == 5 and all(f'"{name}"' in code for name in promised)


def test_the_page_of_reliability_lists_every_attack():
    page = (ROOT / "docs" / "reliability.md").read_text()
    named = re.search(r"^ATTACKS = \{(.*?)^\}", (ROOT / "tests" / "torture" / "__main__.py").read_text(), re.M | re.S)
    assert named is not None
    for module, title in re.findall(r'"(\w+)": "([^"]+)"', named[1]):
        assert (ROOT / "tests" / "torture" / f"{module}.py").exists() and f"| {title} |" in page
    assert page.count("<!-- figures -->") == page.count("<!-- end of figures -->") == 1


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
