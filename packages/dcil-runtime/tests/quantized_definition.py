"""What quantized operators mean, to the bit: sums are whole numbers, and every step after them is one of float32."""

from __future__ import annotations

import definition
import definition_tokens
import numpy as np
from numpy.typing import NDArray

from dcil_runtime import Network, Op
from dcil_runtime.format import NO_ACTIVATION, Activation, Quant, plan_shape

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
F = np.float32


class Tensor:
    """Bytes with their scale and zero point, or real numbers."""

    def __init__(self, real: Floats, quant: Quant | None = None) -> None:
        self.quant = quant
        self.bytes = None if quant is None else rounded(real.astype(F) * F(1 / F(quant[0]).astype(float)) + F(quant[1]))
        self.real = real if self.bytes is None else dequantized(self.bytes, quant)

    @classmethod
    def of_bytes(cls, stored: Bytes, quant: Quant) -> Tensor:
        tensor = cls(dequantized(stored, quant))
        tensor.bytes, tensor.quant = stored, quant
        return tensor


def rounded(x: Floats) -> Bytes:
    return np.clip(np.rint(x), 0, 255).astype(np.uint8)


def dequantized(stored: Bytes, quant: Quant | None) -> Floats:
    assert quant is not None
    return (stored.astype(np.int32) - quant[1]).astype(F) * F(quant[0])


def run(network: Network, x: Floats) -> Floats:
    """Return the network's output for a batch, of its rank."""
    tensors = computed(network, [x.reshape(len(x), *network.input)])
    last = tensors[-2 if network.ops[-1].twin else -1].real
    return last if network.output_rank == 4 else last.reshape(len(x), -1)


def run_ports(network: Network, inputs: list[NDArray]) -> list[Floats]:
    """Return the outputs of a network with lists of inputs and outputs."""
    shaped = [x.reshape(len(x), *plan_shape(port.shape)) for x, port in zip(inputs, network.inputs, strict=True)]
    tensors = computed(network, shaped)
    return [tensors[port.tensor].real.reshape(-1, *port.shape) for port in network.outputs]


def computed(network: Network, inputs: list[NDArray]) -> list[Tensor]:
    tensors = [Tensor(x.astype(F)) for x in inputs]
    for op in network.ops:
        given = [tensors[i] for i in op.inputs]
        rest = tensors[op.residual] if op.residual >= 0 else None
        tensors += (integer(op, given, rest) if given else None) or real(op, given, rest, len(inputs[0]))
    return tensors


def real(op: Op, inputs: list[Tensor], rest: Tensor | None, count: int) -> list[Tensor]:
    """Compute as with floats, and round where the output is quantized."""
    out = definition_tokens.OPERATORS[op.kind](op, [x.real.astype(float) for x in inputs])
    out = np.broadcast_to(out, (count, *out.shape[1:]))
    y = definition.activated(out + (0 if rest is None else rest.real), op.act)
    made = [Tensor(y, op.quant)]
    if op.twin:
        twin = definition.scaled(y, op.arrays["twin_scale"], op.arrays["twin_shift"])
        made.append(Tensor(definition.activated(twin, op.twin_act), op.twin_quant))
    return made


def integer(op: Op, inputs: list[Tensor], rest: Tensor | None) -> list[Tensor] | None:
    """Compute with bytes what is computed with bytes; None for the rest."""
    x = inputs[0]
    if "weight_scale" in op.arrays and op.kind == "conv":
        return requantized(op, sums(op, x), factors(op, x.quant, op.quant), rest)
    if "weight_scale" in op.arrays:
        scale, offset = (each.astype(F) for each in factors(op, x.quant, (1.0, 0)))
        y = (sums(op, x).astype(F) * scale + offset).astype(F)
        return [Tensor(definition.activated(y if rest is None else y + rest.real, op.act), op.quant)]
    if any(each.bytes is None for each in inputs):
        return None
    if op.kind == "map" and op.quant:
        unit = float(F(x.quant[0])) / float(F(op.quant[0]))
        ones = np.ones(x.real.shape[1])
        scale = unit * op.arrays.get("scale", ones).astype(float)
        shift = op.arrays.get("shift", 0 * ones).astype(float) / float(F(op.quant[0]))
        offset = shift + op.quant[1] - scale * x.quant[1]
        return requantized(op, x.bytes, (column(scale), column(offset)), inputs[1] if len(inputs) > 1 else None)
    if op.kind == "concat" and op.quant:
        parts = [Op("map", (0,), quant=op.quant) for _ in inputs]
        stored = [integer(part, [each], None)[0].bytes for part, each in zip(parts, inputs, strict=True)]
        return [Tensor.of_bytes(np.concatenate(stored, 1), op.quant)]
    if op.kind == "mean":
        pixels = x.bytes[0, 0].size
        total = x.bytes.astype(np.int64).sum((2, 3), keepdims=True) - pixels * x.quant[1]
        return [Tensor(total.astype(F) * F(float(F(x.quant[0])) / pixels), op.quant)]
    return None


def column(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    return vector.reshape(1, -1, 1, 1)


def sums(op: Op, x: Tensor) -> NDArray[np.float64]:
    """The sums of products of bytes, less the zero point, with int8: exact."""
    plain = Op(op.kind, (0,), op.window, op.groups, arrays={**op.arrays, "bias": np.zeros_like(op.arrays["bias"])})
    return definition.OPERATORS[op.kind](plain, [x.bytes.astype(float) - x.quant[1]])


def factors(op: Op, source: Quant, out: Quant) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    unit = float(F(source[0])) * op.arrays["weight_scale"].astype(F).astype(float)
    bias = op.arrays["bias"].astype(F).astype(float)
    return column(unit / float(F(out[0]))), column(bias / float(F(out[0])) + out[1])


def requantized(op: Op, total: NDArray, how: tuple[NDArray, NDArray], rest: Tensor | None) -> list[Tensor]:
    scale, offset = how
    share = 0.0 if rest is None else float(F(rest.quant[0])) / float(F(op.quant[0]))
    t = total.astype(F) * scale.astype(F) + (offset - (0 if rest is None else share * rest.quant[1])).astype(F)
    if rest is not None:
        t = t + rest.bytes.astype(F) * F(share)
    if not op.twin and op.act[0] in ("none", "clamp"):
        return [Tensor.of_bytes(np.clip(np.rint(t), *ends(op.act, op.quant)).astype(np.uint8), op.quant)]
    y = activated((t - F(op.quant[1])) * F(op.quant[0]), op.act)
    made = [Tensor(y, op.quant)]
    if op.twin:
        low, high = ends(op.act, op.quant)
        made = [Tensor.of_bytes(np.clip(made[0].bytes, low, high), op.quant)]
        twin = y * column(op.arrays["twin_scale"]).astype(F) + column(op.arrays["twin_shift"]).astype(F)
        made.append(Tensor(activated(twin, op.twin_act), op.twin_quant))
    return made


def activated(x: Floats, act: Activation) -> Floats:
    """In float32 where that is exact."""
    return np.clip(x, F(act[1]), F(act[2])) if act[0] == "clamp" else definition.activated(x, act).astype(F)


def ends(act: Activation, quant: Quant) -> tuple[int, int]:
    if act[0] == "clamp":
        low, high = (np.rint(float(F(end)) / float(F(quant[0]))) + quant[1] for end in act[1:])
        return int(np.clip(low, 0, 255)), int(np.clip(high, 0, 255))
    assert act[0] == "none" or act == NO_ACTIVATION or act[0] not in ("none", "clamp")
    return 0, 255
