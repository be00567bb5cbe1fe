"""The runtime with numpy alone: a network written down by hand, against the definition of its operators."""

from __future__ import annotations

import definition
import numpy as np
import pytest

from dcil_runtime import Network, Op, Plan, PlanError, instruction_set, load, write
from dcil_runtime.format import RELU
from dcil_runtime.native import LIBRARY

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the native module is not built: make native")


def network(rng: np.random.Generator) -> Network:
    """A sparse 3x3 convolution with padding and ReLU, the mean over the pixels, and a linear layer."""
    kernel = rng.standard_normal((6, 3, 3, 3), np.float32) * (rng.random((6, 3, 3, 3)) < 0.3)
    linear = rng.standard_normal((4, 6), np.float32)
    bias = rng.standard_normal(6, np.float32)
    ops = [
        Op("conv", (0,), (3, 3, 1, 1, 1, 1, 1, 1, 1, 1), act=RELU, arrays={"weight": kernel, "bias": bias}),
        Op("mean", (1,)),
        Op("linear", (2,), arrays={"weight": linear, "bias": np.zeros(4, np.float32)}),
    ]
    return Network((3, 9, 7), ops, output_rank=2)


@pytest.mark.parametrize("batch", [1, 5, 16])
@pytest.mark.parametrize("isa", ["", "portable"])
def test_a_plan_computes_its_definition(batch, isa, tmp_path):
    rng = np.random.default_rng(batch)
    net, x = network(rng), rng.standard_normal((batch, 3, 9, 7), np.float32)
    write(net, tmp_path / "net.dcil")
    plan = load(tmp_path / "net.dcil", threads=2, isa=isa, tune_seconds=0.01)
    assert plan.isa == (isa or instruction_set())
    assert np.abs(plan(x) - definition.run(net, x)).max() < 1e-5


def test_a_damaged_file_is_refused(tmp_path):
    file = tmp_path / "net.dcil"
    write(network(np.random.default_rng(0)), file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(PlanError, match="not a usable plan"):
        load(file)


def test_a_network_that_contradicts_itself_is_refused():
    net = network(np.random.default_rng(0))
    net.ops[2].arrays["weight"] = np.ones((4, 7), np.float32)  # positions beyond the six inputs
    with pytest.raises(PlanError):
        Plan(net)
