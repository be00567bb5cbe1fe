"""Write the stored plan files of tests/files with inputs and what their definition gives: python tests/make_files.py.

A file that is there stays as it is: it stands for all that were written by the version it carries. What a new version
adds gets files of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import definition
import definition_tokens
import numpy as np
import quantized_definition
import token_files
from quantized_networks import int8_convolutions, int8_pointwise, int8_twins
from quantized_tokens import eighths, int8_tokens

from dcil_runtime import Network, Op, write
from dcil_runtime.format import RELU

FILES = Path(__file__).parent / "files"
IMAGES = 5
rng = np.random.default_rng(2109_04660)


def noise(*shape: int, keep: float = 1.0) -> np.ndarray:
    values = rng.standard_normal(shape, np.float32)
    return values * (rng.random(shape) < keep)


def conv(source: int, inputs: int, outputs: int, window: tuple[int, ...], keep: float = 0.3, **options) -> Op:
    weight = noise(outputs, inputs // options.get("groups", 1), *window[:2], keep=keep)
    return Op("conv", (source,), window, arrays={"weight": weight / 2, "bias": noise(outputs)}, **options)


def linear(source: int, inputs: int, outputs: int, keep: float, **options) -> Op:
    return Op(
        "linear", (source,), arrays={"weight": noise(outputs, inputs, keep=keep), "bias": noise(outputs)}, **options
    )


def square(kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1) -> tuple[int, ...]:
    return (kernel, kernel, stride, stride, padding, padding, padding, padding, dilation, dilation)


def convolutions() -> Network:
    """Sizes, strides, padding on each side, dilation, groups, dense weights, kept ones, none, a residual."""
    ops = [
        conv(0, 3, 8, square(3, 1, 1), act=RELU),
        conv(1, 8, 8, (3, 2, 2, 1, 1, 0, 2, 1, 1, 1), groups=2),
        conv(2, 8, 8, square(3, 1, 2, 2), keep=0.1, act=RELU),
        conv(3, 8, 8, square(3, 1, 1), groups=8, keep=0.9),
        conv(4, 8, 8, square(1), keep=0.8, residual=2, act=RELU),
        conv(5, 8, 5, (1, 5, 1, 1, 0, 2, 0, 2, 1, 1), keep=0.5),
        conv(6, 5, 5, square(1), keep=0.0, residual=6),
    ]
    return Network((3, 11, 9), ops)


def activations() -> Network:
    acts = [("none", 0.0, 0.0), RELU, ("clamp", -0.5, 6.0), ("clamp", -np.inf, 0.25), ("leaky", 0.125, 0.0)]
    acts += [("silu", 0.0, 0.0), ("hardswish", 0.0, 0.0)]
    ops = [conv(0, 2, 3, square(3, 1, 1), keep=0.5, act=act) for act in acts]
    return Network((2, 7, 10), [*ops, Op("concat", tuple(range(1, len(acts) + 1)))])


def twins() -> Network:
    """Norms and activations before convolutions: a second output beside the first."""
    first, second = conv(0, 3, 6, square(3, 1, 1)), conv(2, 6, 6, square(3, 1, 1), residual=1, act=("silu", 0.0, 0.0))
    for op, act in (first, RELU), (second, ("leaky", 0.25, 0.0)):
        op.twin, op.twin_act = 1, act
        op.arrays |= {"twin_scale": noise(6), "twin_shift": noise(6)}
    return Network((3, 8, 8), [first, second, conv(4, 6, 4, square(3, 2, 1))])


def pools() -> Network:
    """Windows that overlap, padding, dilation of a maximum, sizes rounded up, both ways to count padding."""
    up = (3, 3, 2, 2, 1, 1, 2, 2, 1, 1)
    ops = [
        Op("maxpool", (0,), square(2, 2)),
        Op("maxpool", (0,), (3, 3, 2, 2, 1, 1, 1, 1, 1, 1)),
        Op("maxpool", (0,), (2, 3, 2, 2, 1, 1, 1, 1, 2, 1)),
        Op("avgpool", (0,), square(2, 2)),
        Op("avgpool", (0,), (3, 3, 2, 2, 1, 1, 1, 1, 1, 1)),
        Op("avgpool", (0,), (3, 3, 2, 2, 1, 1, 1, 1, 1, 1), count_pad=1),
        Op("avgpool", (0,), up),
        Op("avgpool", (0,), up, count_pad=1),
        Op("avgpool", (7,), square(2)),
        Op("maxpool", (8,), square(2)),
        Op("concat", (1, 2, 3, 4, 5, 6, 9, 10)),
    ]
    return Network((2, 8, 8), ops)


def maps() -> Network:
    """Scales and sums by themselves, on pixels and, after a mean, on vectors."""
    six = {"scale": noise(6), "shift": noise(6)}
    ops = [
        conv(0, 3, 6, square(3, 2, 1)),
        Op("map", (1,), act=RELU, arrays=six),
        Op("map", (1, 2), act=("hardswish", 0.0, 0.0), arrays={"scale": noise(6), "shift": noise(6)}),
        Op("map", (3, 3), act=("clamp", -1.0, 1.0)),
        Op("concat", (3, 4)),
        Op("mean", (5,)),
        Op("map", (6, 6), act=RELU, arrays={"scale": noise(12), "shift": noise(12)}),
        linear(7, 12, 12, 0.3, residual=6, act=("leaky", 0.01, 0.0)),
        Op("concat", (7, 8)),
    ]
    return Network((3, 13, 6), ops, output_rank=2)


def vectors() -> Network:
    ops = [
        linear(0, 40, 32, 0.1, act=RELU),
        linear(1, 32, 32, 0.9, act=("silu", 0.0, 0.0), residual=1),
        linear(2, 32, 7, 0.0),
        linear(2, 32, 7, 0.4, residual=3),
    ]
    return Network((40, 1, 1), ops, input_rank=2, output_rank=2)


def classifier() -> Network:
    """The whole of a small network, with notes."""
    ops = [
        conv(0, 3, 8, square(3, 1, 1), act=RELU),
        conv(1, 8, 16, square(3, 2, 1), keep=0.1, act=RELU),
        conv(2, 16, 16, square(3, 1, 1), keep=0.1, residual=2, act=("clamp", 0.0, 6.0)),
        Op("maxpool", (3,), square(2, 2)),
        Op("flatten", (4,)),
        linear(5, 16 * 9, 10, 0.2),
    ]
    return Network((3, 12, 12), ops, output_rank=2, notes={"run": 'a "quoted" Ünïcode name\n', "empty": ""})


VERSIONS = {
    1: [convolutions, activations, twins, pools, maps, vectors, classifier],
    2: [int8_convolutions, int8_pointwise, int8_twins],
}
#: Of lists of inputs and outputs.
TOKENS = {2: [token_files.text, token_files.windows, int8_tokens]}


def write_tokens() -> None:
    for version, networks in TOKENS.items():
        for make in networks:
            file, network = FILES / f"v{version}" / f"{make.__name__}.dcil", make()
            quantized = file.stem.startswith("int8_")
            numbers = eighths if quantized else noise
            inputs = [
                rng.integers(0, 5, (IMAGES, *port.shape)) if port.type == "int64" else numbers(IMAGES, *port.shape)
                for port in network.inputs
            ]
            if file.exists():
                continue
            file.parent.mkdir(exist_ok=True)
            write(network, file)
            meaning = quantized_definition.run_ports if quantized else definition_tokens.run
            for name, arrays in ("in", inputs), ("out", meaning(network, inputs)):
                for i, array in enumerate(arrays):
                    kind = np.int64 if array.dtype == np.int64 else np.float32
                    np.save(file.with_suffix(f".{name}{i}.npy"), array.astype(kind))
            sys.stdout.write(f"{file}\n")


def main() -> int:
    for version, networks in VERSIONS.items():
        folder = FILES / f"v{version}"
        folder.mkdir(parents=True, exist_ok=True)
        for make in networks:
            file, network = folder / f"{make.__name__}.dcil", make()
            shape = network.input if network.input_rank == 4 else network.input[:1]
            x = noise(IMAGES, *shape)
            if file.exists():
                continue
            write(network, file)
            np.save(file.with_suffix(".in0.npy"), x)
            meaning = definition.run if version == 1 else quantized_definition.run
            np.save(file.with_suffix(".out0.npy"), meaning(network, x).astype(np.float32))
            sys.stdout.write(f"{file}\n")
    write_tokens()
    return 0


if __name__ == "__main__":
    sys.exit(main())
