"""Choose the scale and zero point of tensors from what they hold on calibration images."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from dcil_runtime import Network, Op, Plan
from dcil_runtime.format import Quant

Floats = NDArray[np.float32]
#: Values kept of a tensor, drawn from all images alike.
SAMPLE = 1 << 17
#: Ranges tried: these parts of the whole range.
PARTS = np.linspace(0.25, 1, 46)


def observed(network: Network, images: Floats, tensors: Iterable[int], seed: int = 0) -> dict[int, Floats]:
    """Return a sample of the values of each tensor of a plan, with its extremes.

    A tensor is read by running the plan up to it, so every operator that the runtime has can be observed.
    """
    random, found = np.random.default_rng(seed), {}
    each = max(1, SAMPLE // len(images))
    made = makers(network)
    for tensor in tensors:
        run = plan_of(Network(network.input, [*network.ops[: made[tensor] + 1], Op("map", (tensor,))], 4, 4))
        parts, low, high = [], np.inf, -np.inf
        for image in images.reshape(len(images), 1, *network.input):
            values = run(image).ravel()
            low, high = min(low, float(values.min())), max(high, float(values.max()))
            parts.append(values if values.size <= each else values[random.integers(values.size, size=each)])
        found[tensor] = np.concatenate([*parts, np.array([low, high], np.float32)])
    return found


def plan_of(network: Network) -> Plan:
    """Return a plan for a few runs of one image each: without tuning, and without the limits for strangers' files."""
    return Plan(network, tune_seconds=0, max_memory=None, max_work=None)


def makers(network: Network) -> dict[int, int]:
    """Return the operator that makes each tensor, by the tensor's number; -1 for the input."""
    made = {0: -1}
    for place, op in enumerate(network.ops):
        for _ in range(1 + op.twin):
            made[len(made)] = place
    return made


def quant_for(sample: Floats) -> Quant:
    """Return the scale and zero point with the least mean squared error on the sample.

    The range [a, b] is a part of the observed one, with 0 in it: numbers beyond it are clipped. One without negative
    numbers has zero point 0.
    """
    low, high = min(0.0, float(sample.min())), max(0.0, float(sample.max()))
    if high - low < 1e-12:
        return 1.0, 0
    return min((_scaled(low, high, part) for part in PARTS), key=lambda quant: squared_error(sample, quant))


def _scaled(low: float, high: float, part: float) -> Quant:
    scale = float(np.float32((high - low) * part / 255))
    return scale, int(np.clip(np.rint(-low * part / scale), 0, 255))


def squared_error(sample: Floats, quant: Quant) -> float:
    scale, zero = quant
    stored = np.clip(np.rint(sample * np.float32(1 / scale)) + zero, 0, 255)
    return float(np.square((stored - zero) * np.float32(scale) - sample).mean())
