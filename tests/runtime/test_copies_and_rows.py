"""Convolutions whose input is copied or padded in memory, and rows of very different lengths, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from dcil.runtime import compile_plan, instruction_set
from dcil_runtime.native import LIBRARY

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the native module is not built: make native")
SETS = [name for name in ("portable", "wide", "avx2", "avx512") if LIBRARY.exists() and instruction_set(name)]


def close(module: nn.Module, x: torch.Tensor, isa: str = "", threads: int = 1) -> None:
    with torch.no_grad():
        want = module.eval()(x).numpy()
    got = compile_plan(module, x[:1], threads, isa)(x.numpy())
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("size", [(28, 28), (27, 29), (5, 30)])
@pytest.mark.parametrize("stride", [2, (2, 1), 3])
def test_a_pointwise_convolution_that_skips_pixels(
    isa: str, size: tuple[int, int], stride: int | tuple[int, int]
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 9, 1, stride), nn.Conv2d(9, 4, 3, padding=1)
    )
    close(net, torch.randn(3, 3, *size), isa)


def test_only_the_pixels_that_it_reads_are_copied() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 9, 1, 2)).eval()
    plan = compile_plan(net, torch.zeros(1, 3, 28, 28), isa="wide")
    steps = plan._native.describe(1)["steps"]
    assert [step["output"] for step in steps if step["work"] == "gather"] == [[8, 14, 14]]


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("width", [232, 248, 496])  # about 64 cache lines in a row of a sub-tile
@pytest.mark.parametrize("stride", [1, 2])
def test_rows_as_long_as_the_cache_has_sets(isa: str, width: int, stride: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 7, stride, padding=3), nn.Conv2d(4, 3, 1), nn.MaxPool2d(3, 2, 1))
    close(net, torch.randn(1, 2, 17, width), isa)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_all_lengths(isa: str, threads: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(64, 40, 3, padding=1), nn.ReLU(), nn.Conv2d(40, 21, 1))
    for layer in (net[0], net[2]):
        rows = layer.weight.data.flatten(1)
        rows.mul_(torch.rand_like(rows) < torch.linspace(0, 1, len(rows))[torch.randperm(len(rows)), None])
    close(net, torch.randn(1, 64, 14, 14), isa, threads)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("outputs", [1, 3, 4, 7])
def test_dense_layers_of_any_size(isa: str, outputs: int) -> None:
    torch.manual_seed(0)
    close(nn.Sequential(nn.Linear(37, outputs), nn.ReLU(), nn.Linear(outputs, 5)), torch.randn(3, 37), isa)
