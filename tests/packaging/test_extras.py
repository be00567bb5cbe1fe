"""A base install is small, and what it lacks is asked for in one line that names the extra."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import torch
from environments import TREE
from torch import nn

from dcil import UserError, data
from dcil.data import cifar
from dcil.errors import missing_extra
from dcil.export import export

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

PROJECT = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def package(requirement: str) -> str:
    return re.split(r"[\[<>=;! ]", requirement)[0].lower()


def test_the_base_install_brings_four_packages():
    assert {package(r) for r in PROJECT["dependencies"]} == {"torch", "numpy", "safetensors", "rich"}
    assert not any("<" in r for r in PROJECT["dependencies"])


def asked_for() -> list[tuple[str, str]]:
    """Find every (package, extra) that the source asks for with literal arguments."""
    found = []
    for path in (TREE / "src" / "dcil").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "missing_extra":
                *_, name, extra = [None, None, *(getattr(arg, "value", None) for arg in node.args)]
                if isinstance(name, str) and isinstance(extra, str):
                    found.append((name, extra))
    return found


def test_every_package_asked_for_is_in_the_extra_that_the_message_names():
    assert len(asked_for()) >= 4
    for name, extra in asked_for():
        assert name.lower() in {package(r) for r in EXTRAS[extra]}, f"dcil[{extra}] does not bring {name}"


def test_the_message_is_one_line_with_the_command_to_type():
    error = missing_extra("pooch", "data")
    assert isinstance(error, UserError) and error.exit_code == 2
    assert str(error) == "pooch must be installed for this: pip install 'dcil[data]'"


def absent(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


def test_digits_without_scikit_learn(monkeypatch):
    absent(monkeypatch, "sklearn", "sklearn.datasets")
    with pytest.raises(UserError, match=r"scikit-learn .* pip install 'dcil\[data\]'"):
        data.load("digits", Path())


def test_a_download_without_pooch_also_says_where_the_files_go_by_hand(tmp_path, monkeypatch):
    absent(monkeypatch, "pooch")
    with pytest.raises(UserError, match=r"pip install 'dcil\[data\]'.*put data_batch_1.bin.* into") as caught:
        data.load("cifar10", tmp_path)
    assert "\n" not in str(caught.value) and cifar.CIFAR10.url in str(caught.value)


def test_a_cpu_plan_without_dcil_runtime(tmp_path, monkeypatch):
    for name in [n for n in sys.modules if n.startswith(("dcil.runtime", "dcil_runtime"))]:
        monkeypatch.delitem(sys.modules, name)
    absent(monkeypatch, "dcil_runtime")
    with pytest.raises(UserError, match=r"dcil-runtime .* pip install 'dcil\[cpu\]'"):
        export(nn.Linear(2, 2), "cpu", tmp_path / "net.dcil", example=torch.randn(1, 2))
    assert list(tmp_path.iterdir()) == []
