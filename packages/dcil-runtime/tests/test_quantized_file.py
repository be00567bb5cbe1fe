"""Quantized tensors and int8 weights in plan files: what is written comes back, what contradicts itself is refused."""

from __future__ import annotations

import json

import numpy as np

from dcil_runtime import Network, Op
from dcil_runtime.format import HEADER, decode, encode


def conv(**changes) -> Op:
    rng = np.random.default_rng(0)
    arrays = {
        "weight": rng.integers(-127, 128, (5, 3, 3, 3)).astype(np.int8),
        "weight_scale": rng.uniform(0.001, 0.01, 5).astype(np.float32),
        "bias": rng.standard_normal(5).astype(np.float32),
    }
    return Op("conv", (1,), (3, 3, 1, 1, 1, 1, 1, 1, 1, 1), quant=(0.05, 7), arrays={**arrays, **changes})


def network(**changes) -> Network:
    return Network((3, 8, 8), [Op("map", (0,), quant=(0.02, 128)), conv(**changes), Op("map", (2,))])


def test_what_is_written_comes_back():
    back = decode(encode(network()))
    assert [op.quant for op in back.ops] == [(0.02, 128), (0.05, 7), None]
    for name, array in conv().arrays.items():
        assert back.ops[1].arrays[name].dtype == array.dtype
        assert np.array_equal(back.ops[1].arrays[name], array.reshape(-1))


def test_kept_int8_weights_are_stored_with_their_positions():
    weight = conv().arrays["weight"] * (np.arange(135).reshape(5, 3, 3, 3) % 7 == 0)
    back = decode(encode(network(weight=weight))).ops[1].arrays
    dense = np.zeros(135, np.int8)
    dense[back["index"]] = back["weight"]
    assert np.array_equal(dense, weight.reshape(-1))


def test_the_version_is_the_oldest_that_has_what_is_used():
    plain = Network((3, 8, 8), [Op("map", (0,))])
    assert [HEADER.unpack_from(encode(net))[1] for net in (plain, network())] == [1, 2]
    assert b"quant" not in encode(plain) and json.dumps([0.05, 7], separators=(",", ":")).encode() in encode(network())
