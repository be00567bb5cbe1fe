"""Quantized tensors among the operators on tokens: the bits of the definition, or a refusal."""

from __future__ import annotations

import numpy as np
import pytest
import quantized_definition
from quantized_tokens import dense, eighths, int8_tokens
from test_quantized_run import refusal, sets

from dcil_runtime import Network, Op, Plan
from dcil_runtime.native import LIBRARY

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the native module is not built: make native")
rng = np.random.default_rng(7)


@pytest.mark.parametrize("isa", sets())
def test_tokens_of_bytes_are_those_of_the_definition(isa):
    network = int8_tokens()
    inputs = [rng.integers(0, 5, (5, 11)), eighths(5, 6, 11)]
    wanted = quantized_definition.run_ports(network, inputs)
    for threads, count in (1, 5), (2, 1):
        found = Plan(network, threads=threads, isa=isa, tune_seconds=0.02)(*(x[:count] for x in inputs))
        for number, (y, want) in enumerate(zip(found, wanted, strict=True)):
            assert np.abs(y - want[:count]).max() <= (1e-5 if number == 2 else 0)  # attention divides


def test_a_quantized_constant_lies_in_the_file_as_floats():
    constant = Op("constant", (), shape=(2, 1, 1), quant=(0.5, 3), arrays={"table": np.array([0.7, -9])})
    y = Plan(Network((1, 1, 1), [constant, Op("map", (1,))], output_rank=2), tune_seconds=0)(np.zeros((1, 1, 1, 1)))
    assert np.array_equal(y, [[0.5, -1.5]])


def test_only_layers_have_int8_weights():
    arrays = {"table": np.ones(2), "weight_scale": np.ones(2)}
    assert "only a convolution or linear layer" in refusal([Op("constant", (), shape=(2, 1, 1), arrays=arrays)])


def test_shapes_of_what_attention_adds_are_compared_without_overflow():
    window = (1, 1, 1, 1, 0, 0, 0, 0, 1, 1)
    attention = Op("attention", (0,), window, shape=(1 << 24, 1 << 24, 64), arrays={"index": np.arange(3)})
    assert "adds nothing" in refusal([attention])


def test_info_names_the_type_of_weights():
    network = Network((3, 4, 4), [Op("map", (0,), quant=(0.1, 0)), dense(1, 3, 2, quant=(0.1, 0)), Op("map", (2,))])
    assert [op.get("dtype") for op in Plan(network, tune_seconds=0).info()["operators"]] == [None, "int8", None]
