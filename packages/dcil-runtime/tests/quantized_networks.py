"""Networks with quantized tensors for tests and stored files."""

from __future__ import annotations

import numpy as np

from dcil_runtime import Network, Op
from dcil_runtime.format import RELU, Quant

rng = np.random.default_rng(2024)


def square(kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1) -> tuple[int, ...]:
    return (kernel, kernel, stride, stride, padding, padding, padding, padding, dilation, dilation)


def layer(kind: str, source: int, inputs: int, outputs: int, keep: float, **options) -> Op:
    window = options.get("window", (1, 1))
    weight = rng.integers(-127, 128, (outputs, inputs // options.get("groups", 1), *window[:2]))
    arrays = {
        "weight": (weight * (rng.random(weight.shape) < keep)).astype(np.int8),
        "weight_scale": rng.uniform(0.002, 0.01, outputs).astype(np.float32),
        "bias": rng.standard_normal(outputs).astype(np.float32),
    }
    return Op(kind, (source,), arrays=arrays, **options)


def conv(source: int, inputs: int, outputs: int, window: tuple[int, ...], keep: float = 0.3, **options) -> Op:
    return layer("conv", source, inputs, outputs, keep, **{"window": window, "quant": (0.05, 0), **options})


def int8_convolutions() -> Network:
    """Sizes, strides, padding on each side, dilation, groups, dense and no weights, residuals, zero points."""
    signed: Quant = (0.06, 120)
    ops = [
        Op("map", (0,), quant=(0.03, 128)),
        conv(1, 3, 8, square(3, 1, 1), act=RELU),
        conv(2, 8, 8, (3, 2, 2, 1, 1, 0, 2, 1, 1, 1), groups=2, quant=signed),
        conv(3, 8, 8, square(3, 1, 2, 2), keep=0.1, act=RELU),
        conv(4, 8, 8, square(3, 1, 1), groups=8, keep=0.9, quant=signed),
        conv(5, 8, 8, square(1), keep=0.8, residual=3, quant=signed),
        conv(6, 8, 8, square(1), keep=0.2, residual=4, act=("clamp", 0.0, 6.0)),
        conv(7, 8, 5, (1, 5, 1, 1, 0, 2, 0, 2, 1, 1), keep=0.5, act=("clamp", -0.5, 3.0), quant=(0.03, 17)),
        conv(8, 5, 5, square(1), keep=0.0, residual=8, quant=(0.04, 10)),
        conv(9, 5, 6, square(3, 3, 1), keep=0.5, quant=(0.04, 100)),
        Op("map", (10,)),
    ]
    return Network((3, 11, 9), ops)


def int8_pointwise() -> Network:
    """Maps, sums, pooling, concatenation and the mean of bytes, and what goes through floats between them."""
    six = {"scale": rng.standard_normal(6).astype(np.float32), "shift": rng.standard_normal(6).astype(np.float32)}
    same: Quant = (0.04, 90)
    ops = [
        Op("map", (0,), quant=(0.03, 128)),
        conv(1, 3, 6, square(3, 2, 1), keep=0.6, quant=same),
        Op("map", (2,), act=RELU, arrays=six, quant=(0.02, 0)),
        Op("map", (3, 2), act=("clamp", -1.0, 2.0), quant=(0.02, 60)),
        Op("maxpool", (2,), square(3, 2, 1), quant=same),
        Op("maxpool", (4,), square(2, 2), quant=(0.02, 60)),
        Op("avgpool", (4,), square(2, 2), quant=same),
        Op("concat", (2, 2), quant=same),
        Op("maxpool", (8,), square(2, 1), quant=(0.03, 90)),
        Op("mean", (8,)),
        Op("map", (10,), quant=(0.02, 100)),
        layer("linear", 11, 12, 7, 0.5, act=RELU),
        layer("linear", 11, 12, 7, 0.9, residual=12, quant=(0.05, 40)),
        Op("concat", (6, 7), quant=(0.03, 70)),
        Op("mean", (14,), quant=(0.02, 90)),
        layer("linear", 15, 12, 7, 0.9, residual=13),
        Op("mean", (9,)),
        Op("mean", (5,)),
        Op("concat", (16, 17, 18)),
    ]
    return Network((3, 13, 10), ops, output_rank=2)


def int8_twins() -> Network:
    """Two outputs of a convolution, each with its own scale and activation; a layer kept in floats between them."""
    first = conv(1, 3, 6, square(3, 1, 1), quant=(0.05, 128))
    second = conv(3, 6, 6, square(3, 1, 1), residual=2, quant=(0.06, 128))
    for op, act in (first, RELU), (second, ("leaky", 0.25, 0.0)):
        op.twin, op.twin_act, op.twin_quant = 1, act, (0.04, 30)
        op.arrays |= {name: rng.standard_normal(6).astype(np.float32) for name in ("twin_scale", "twin_shift")}
    weight = rng.standard_normal((4, 6, 3, 3)).astype(np.float32) / 4
    ops = [
        Op("map", (0,), quant=(0.03, 128)),
        first,
        second,
        Op("conv", (5,), square(3, 2, 1), arrays={"weight": weight, "bias": np.zeros(4, np.float32)}),
    ]
    return Network((3, 8, 8), ops)


NETWORKS = [int8_convolutions, int8_pointwise, int8_twins]
