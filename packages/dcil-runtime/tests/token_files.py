"""The networks of the stored files with tokens: several inputs and outputs, and the operators that came with them."""

from __future__ import annotations

import numpy as np

from dcil_runtime import Input, Network, Op, Output

rng = np.random.default_rng(1810_04805)
GELU = ("gelu", 0.0, 0.0)


def noise(*shape: int, keep: float = 1.0) -> np.ndarray:
    return rng.standard_normal(shape, np.float32) * (rng.random(shape) < keep)


def dense(source: int, inputs: int, outputs: int, keep: float = 0.4, **options) -> Op:
    """A linear layer over tokens."""
    arrays = {"weight": noise(outputs, inputs, 1, 1, keep=keep), "bias": noise(outputs)}
    return Op("conv", (source,), arrays=arrays, **options)


def norm(source: int, channels: int) -> Op:
    return Op("layernorm", (source,), number=1e-5, arrays={"scale": noise(channels), "shift": noise(channels)})


def heads(number: int, depth: int, width: int) -> dict:
    return {"groups": number, "window": (depth, width, 1, 1, 0, 0, 0, 0, 1, 1)}


def text() -> Network:
    """Numbers and a mask of 9 tokens: embeddings, positions, attention, a class and every token's result."""
    ops = [
        Op("embedding", (0,), shape=(12, 1, 9), arrays={"table": noise(7, 12)}),  # 2
        Op("constant", (), shape=(12, 1, 9), arrays={"table": noise(12, 9)}),
        Op("add", (2, 3)),
        norm(4, 12),
        dense(5, 12, 36),  # 6
        Op(
            "attention",
            (6, 1),
            **heads(3, 4, 4),
            count_pad=1,
            number=0.5,
            shape=(1, 1, 9),
            arrays={"index": np.arange(36), "table": np.where(np.tri(9).T, 0, -np.inf)},
        ),
        dense(7, 12, 12, residual=4),
        dense(8, 12, 20, act=GELU),
        dense(9, 20, 12, residual=8),  # 10
        Op("take", (10,), shape=(12, 1, 1), arrays={"index": np.arange(12) * 9}),
        Op("linear", (11,), arrays={"weight": noise(5, 12, keep=0.5), "bias": noise(5)}),
        Op("take", (10,), shape=(9, 1, 12), arrays={"index": np.arange(108).reshape(12, 9).T.ravel()}),
    ]
    inputs = [Input((9,), "int64"), Input((9,))]
    return Network((9, 1, 1), ops, inputs=inputs, outputs=[Output(13, (9, 12)), Output(12, (5,))])


def windows() -> Network:
    """Images in shifted windows with positions, queries and values of other widths, rows and columns, zeros."""
    pixels = np.roll(np.arange(24).reshape(4, 6), (1, 2), (0, 1)).reshape(2, 2, 2, 3).swapaxes(1, 2).ravel()
    ops = [
        Op("conv", (0,), (3, 3, 1, 1, 1, 1, 1, 1, 1, 1), arrays={"weight": noise(10, 3, 3, 3), "bias": noise(10)}),  # 1
        Op(
            "attention",
            (1,),
            **heads(2, 2, 3),
            number=0.7,
            shape=(4, 2, 6),
            arrays={"index": rng.permutation(14) % 10, "tokens": pixels, "table": noise(4, 2, 6, 6)},
        ),
        Op("attention", (1, 2), **heads(1, 3, 5), number=0.1, arrays={"index": np.arange(11)}),  # 3
        Op("rows", (3,), shape=(5, 7, 6), arrays={"weight": noise(7, 4, keep=0.5)}),
        Op("columns", (4,), shape=(5, 7, 4), arrays={"weight": noise(4, 6)}),
        Op("constant", (), shape=(5, 1, 1), arrays={"table": noise(5)}),
        Op("mul", (5, 6)),  # 7
        Op(
            "take",
            (7, 2),
            shape=(3, 5, 5),
            arrays={"index": np.where(np.arange(75) % 9, np.arange(75) * 3, 0xFFFFFFFF)},
        ),
    ]
    return Network((3, 4, 6), ops, inputs=[Input((3, 4, 6))], outputs=[Output(8, (3, 5, 5)), Output(5, (5, 28))])
