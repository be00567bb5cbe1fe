"""Measure what int8 costs layer by layer, and keep in fp32 the layers where accuracy asks for it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from dcil.runtime.quantize import calibrated, layers_of, quantized
from dcil.runtime.ranges import Floats, plan_of
from dcil_runtime import Network

#: Share of calibration images whose prediction may change before layers are kept in fp32, and how many may be.
MOST_CHANGED, MOST_KEPT = 0.01, 4
#: Calibration images that each layer alone is measured on.
ALONE = 64


@dataclass(frozen=True)
class Quantization:
    """A network in int8 and what was measured on the calibration images.

    ``errors``: by operator of the fp32 network, the squared error of the outputs with this layer alone in int8, as a
    part of their variance over images. ``changed``: the share of images whose prediction changed, all layers together.
    """

    network: Network
    errors: dict[int, float]
    kept: list[int]  # layers in fp32, the one with the largest error first
    changed: float

    def worst(self, count: int = 3) -> list[int]:
        """Return the layers that cost most."""
        return sorted(self.errors, key=lambda k: -self.errors[k])[:count]


def outputs(network: Network, images: Floats) -> Floats:
    plan = plan_of(network)
    # One by one: for several at once the runtime would first try which arrangement of them is the fastest.
    return np.concatenate([plan(image[None]) for image in images])


def quantize(network: Network, images: Floats) -> Quantization:
    """Return the network in int8, calibrated on a batch of images."""
    quants, layers = calibrated(network, images), layers_of(network)
    want, few = outputs(network, images), images[:ALONE]
    spread = float(np.square(want - want.mean(0)).mean()) or 1.0

    def error(chosen: Collection[int]) -> float:
        off = outputs(quantized(network, quants, chosen), few) - want[: len(few)]
        return float(np.square(off).mean()) / spread

    errors = {k: error([k]) for k in layers}
    order = sorted(layers, key=lambda k: -errors[k])
    for count in range(1 + min(MOST_KEPT, len(layers))):
        found = quantized(network, quants, [k for k in layers if k not in order[:count]])
        changed = float((outputs(found, images).argmax(1) != want.argmax(1)).mean())
        if changed <= MOST_CHANGED:
            break
    return Quantization(found, errors, order[:count], changed)


def named(network: Network, place: int) -> str:
    """Return how an operator is named to people."""
    op = network.ops[place]
    outputs_, inputs = len(op.arrays["bias"]), op.arrays["weight"].size // len(op.arrays["bias"])
    if op.kind == "linear":
        return f"operator {place} (linear, {inputs} to {outputs_})"
    height, width = op.window[:2]
    return f"operator {place} (conv {height} x {width}, {inputs // (height * width) * op.groups} to {outputs_})"
