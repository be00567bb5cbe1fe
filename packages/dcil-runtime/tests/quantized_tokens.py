"""A network with quantized tensors among the operators on tokens, for tests and a stored file."""

from __future__ import annotations

import numpy as np
from quantized_networks import layer, square

from dcil_runtime import Input, Network, Op, Output
from dcil_runtime.format import RELU

rng = np.random.default_rng(7)


def eighths(*shape: int) -> np.ndarray:
    """Numbers whose sums and products are exact in any order."""
    return (rng.integers(-8, 9, shape) / 8).astype(np.float32)


def exact(op: Op) -> Op:
    """The layer with scales that are powers of two, and biases like the other numbers."""
    outputs = len(op.arrays["bias"])
    op.arrays |= {"weight_scale": np.full(outputs, 1 / 64, np.float32), "bias": eighths(outputs)}
    op.arrays["weight"] = op.arrays["weight"] // 16
    return op


def dense(source: int, inputs: int, outputs: int, **options) -> Op:
    """An int8 layer over tokens."""
    return exact(layer("conv", source, inputs, outputs, 0.6, window=square(1), **options))


def int8_tokens() -> Network:
    """Every way from and to bytes that tokens take: rows of pixels, vectors, numbers of the file and of the caller."""
    step = (0.125, 100)
    twin = {"twin_scale": np.full(5, -0.5, np.float32), "twin_shift": eighths(5)}
    first = dense(3, 6, 5, quant=step, twin=1, act=RELU, twin_quant=(0.25, 128))
    first.arrays |= twin
    take = rng.permutation(110)[:84].astype(np.uint32)
    take[::9] = 0xFFFFFFFF
    ops = [
        Op("embedding", (0,), shape=(6, 1, 11), arrays={"table": eighths(5, 6)}, quant=step),  # 2
        Op("map", (2, 1), quant=(0.0625, 128)),  # 3: bytes and floats
        first,  # 4, and 5 its twin
        Op("constant", (), shape=(5, 1, 11), arrays={"table": eighths(55)}, quant=(0.125, 30)),  # 6
        Op("map", (4, 6), quant=step),
        Op("take", (7, 5), shape=(3, 4, 7), arrays={"index": take}, quant=(0.125, 128)),  # 8
        exact(layer("conv", 8, 3, 3, 1.0, window=square(3, 1, 1), quant=(0.5, 90), residual=8)),  # 9
        Op("rows", (9,), shape=(3, 2, 7), arrays={"weight": eighths(2, 4)}, quant=(0.25, 100)),
        Op("columns", (10,), shape=(3, 2, 8), arrays={"weight": eighths(8, 7)}),  # 11
        Op("mean", (11,), quant=step),
        exact(layer("linear", 12, 3, 4, 1.0)),  # 13
        Op(
            "attention",
            (7, 5),
            (3, 4, 1, 1, 0, 0, 0, 0, 1, 1),
            2,
            number=0.25,
            arrays={"index": rng.permutation(20) % 10},
        ),
        Op("map", (5,)),  # 15
    ]
    outputs = [Output(15, (5, 11)), Output(13, (4,)), Output(14, (8, 11)), Output(11, (48,)), Output(1, (6, 11))]
    return Network((1, 1, 1), ops, inputs=[Input((11,), "int64"), Input((6, 11))], outputs=outputs)
