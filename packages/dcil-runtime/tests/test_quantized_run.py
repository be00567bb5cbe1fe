"""Quantized networks give the bits of their definition with every instruction set, batch and number of threads."""

from __future__ import annotations

import numpy as np
import pytest
import quantized_definition
from quantized_networks import NETWORKS, conv, rng, square

from dcil_runtime import Network, Op, Plan, PlanError, instruction_set
from dcil_runtime.native import LIBRARY

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the native module is not built: make native")
SETS = ["portable", "wide", "avx2", "avx2-plain", "avx512", "avx512-plain", "neon", "neon-plain"]


def sets() -> list[str]:
    return [isa for isa in SETS if LIBRARY.exists() and instruction_set(isa)]


@pytest.mark.parametrize("make", NETWORKS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("isa", sets())
def test_outputs_are_those_of_the_definition(make, isa):
    network = make()
    x = rng.standard_normal((19, *network.input), np.float32)
    want = quantized_definition.run(network, x)
    for threads, count in (1, 19), (2, 3), (1, 1):
        y = Plan(network, threads=threads, isa=isa, tune_seconds=0.02)(x[:count])
        assert np.abs(y - want[:count]).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("isa", sets())
def test_random_convolutions(isa):
    for _ in range(12):
        groups, kernel, pad = (int(rng.integers(1, high)) for high in (3, 5, 4))
        inputs, outputs = (groups * int(rng.integers(1, 9)) for _ in range(2))
        stride, dilation = int(rng.integers(1, kernel + 1)), int(rng.integers(1, 3))
        height, width = (int(rng.integers(kernel * 2, 30)) for _ in range(2))
        op = conv(1, inputs, outputs, square(kernel, stride, pad, dilation), groups=groups, keep=rng.random())
        op.quant = (0.1, int(rng.integers(0, 256)))
        source = Op("map", (0,), quant=(0.03, int(rng.integers(0, 256))))
        network = Network((inputs, height, width), [source, op, Op("map", (2,))])
        x = rng.standard_normal((int(rng.integers(1, 20)), *network.input), np.float32)
        want = quantized_definition.run(network, x)
        for seconds in (0, 0.05):
            assert np.array_equal(Plan(network, isa=isa, tune_seconds=seconds)(x), want)


def test_every_instruction_set_gives_the_same_bits():
    for make in NETWORKS[:2]:
        network = make()
        x = rng.standard_normal((5, *network.input), np.float32)
        found = [Plan(network, isa=isa, tune_seconds=0)(x) for isa in sets()]
        assert all(np.array_equal(found[0], other) for other in found[1:])


def refusal(ops: list[Op]) -> str:
    with pytest.raises(PlanError) as found:
        Plan(Network((3, 8, 8), ops))
    assert "\n" not in str(found.value)
    return str(found.value)


def test_an_int8_convolution_needs_quantized_tensors_around_it():
    source = Op("map", (0,), quant=(0.03, 128))
    assert "output is not quantized" in refusal([source, conv(1, 3, 3, square(1), quant=None)])
    assert "residual is not quantized" in refusal([source, conv(1, 3, 3, square(1), residual=0), Op("map", (2,))])


@pytest.mark.parametrize("isa", sets())
def test_layers_that_differ_in_their_halos_alone_share_no_choice(isa):
    """A 1 x 1 convolution takes a plane as one row, unless a 3 x 3 after it wants a halo."""
    weights = [rng.standard_normal((8, 8, k, k)).astype(np.float32) for k in (1, 1, 3)]
    windows = square(1), square(1), square(3, 1, 1)
    floats = [
        Op("conv", (i,), window, arrays={"weight": weight, "bias": np.zeros(8, np.float32)})
        for i, (window, weight) in enumerate(zip(windows, weights, strict=True))
    ]
    layers = [conv(i, 8, 8, window, keep=1) for i, window in enumerate(windows, 1)]
    for ops in floats, [Op("map", (0,), quant=(0.03, 128)), *layers, Op("map", (4,))]:
        network = Network((8, 24, 4), ops)
        x = rng.standard_normal((1, 8, 24, 4), np.float32)
        want = quantized_definition.run(network, x)
        assert np.abs(Plan(network, isa=isa, tune_seconds=0.2)(x) - want).max() <= 1e-5 * np.abs(want).max()
