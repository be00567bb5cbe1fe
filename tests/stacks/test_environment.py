"""The environment of this suite: the frameworks in the pinned versions, on the torch of the other tests."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PINS = re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints-stacks.txt").read_text(), re.M)


@pytest.mark.parametrize(("package", "version"), PINS)
def test_the_pinned_versions_are_installed(package, version):
    assert metadata.version(package) == version


def test_torch_is_the_one_of_the_other_tests():
    (pinned,) = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert torch.__version__.split("+")[0] == pinned


def test_torchvision_is_imported_where_its_operators_are_not_compiled_for_this_torch():
    from torchvision import models

    assert models.resnet18(num_classes=3)(torch.randn(2, 3, 32, 32)).shape == (2, 3)


def test_only_when_named_are_these_tests_collected(pytestconfig):
    assert "stacks" in pytestconfig.getini("norecursedirs")
