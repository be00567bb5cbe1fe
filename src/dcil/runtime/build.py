"""Build plan operators: fold norm layers, fuse activations and additions, number the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcil_runtime import Network, Op
from dcil_runtime.format import ARRAYS, NO_ACTIVATION, Activation

Array = NDArray[np.floating[Any]]
#: Operators that apply an activation to what they store.
WITH_ACTIVATION = ("conv", "linear", "map", "add", "sub", "mul", "div", "layernorm", "groupnorm")


@dataclass(eq=False)
class Value:
    """The output tensor of ``step``; ``uses`` counts the operators that read it."""

    step: Step | None
    uses: int = 0


@dataclass(eq=False)
class Step:
    """An operator whose inputs are not numbered yet; ``arrays`` are float64, except for the weights."""

    op: Op
    inputs: list[Value]
    place: int
    residual: Value | None = None
    twin: Value | None = None
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        """Return whether more can be fused into it."""
        return self.op.act == NO_ACTIVATION and self.twin is None


class Builder:
    """Receives operators in order; each call adds a step or changes an earlier one."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.input = Value(None, 2)
        self.steps: list[Step] = []

    def uses(self, value: Value, count: int) -> None:
        """Set how many operators read a result; add to the count if fusion returned an earlier value."""
        value.uses = value.uses + count - 1 if value.uses else count

    def layer(
        self,
        kind: str,
        value: Value,
        weight: Array,
        bias: Array,
        window: tuple[int, ...] = (1, 1, 1, 1, 0, 0, 0, 0, 1, 1),
        groups: int = 1,
    ) -> Value:
        step = self.step(Op(kind, (), window, groups), [value])
        assert step.step is not None
        step.step.arrays = {"weight": weight, "bias": bias}
        return step

    def plain(
        self,
        kind: str,
        values: list[Value],
        window: tuple[int, ...] = (1, 1, 1, 1, 0, 0, 0, 0, 1, 1),
        count_pad: int = 0,
    ) -> Value:
        return self.step(Op(kind, (), window, count_pad=count_pad), values)

    def step(self, op: Op, inputs: list[Value]) -> Value:
        self.steps.append(Step(op, inputs, len(self.steps)))
        return Value(self.steps[-1])

    def norm(self, kind: str, value: Value, scale: Array, shift: Array, eps: float, groups: int = 1) -> Value:
        result = self.step(Op(kind, (), groups=groups, number=eps), [value])
        assert result.step is not None
        result.step.arrays = {"scale": scale, "shift": shift}
        return result

    def select(self, values: list[Value], channels: NDArray[np.integer[Any]]) -> Value:
        """Take channels, numbered through all of ``values``, in any order."""
        result = self.step(Op("select", ()), values)
        assert result.step is not None
        result.step.arrays = {"index": channels}
        return result

    def affine(self, value: Value, scale: Array, shift: Array) -> Value:
        """Apply scale * x + shift, folded into the layer before if nothing else reads its output."""
        step = value.step
        if step and value.uses == 1 and step.op.kind in ("conv", "linear") and step.open and step.residual is None:
            weight, bias = step.arrays["weight"], step.arrays["bias"]
            step.arrays["weight"] = weight * scale.astype(np.float32).reshape(-1, *(1,) * (weight.ndim - 1))
            step.arrays["bias"] = bias * scale + shift
            return value
        result = self.step(Op("map", ()), [value])
        assert result.step is not None
        result.step.arrays = {"scale": scale, "shift": shift}
        return result

    def activate(self, value: Value, act: Activation) -> Value:
        step = value.step
        if step and value.uses == 1 and step.op.kind in WITH_ACTIVATION and step.open:
            step.op.act = act
            return value
        return self.step(Op("map", (), act=act), [value])

    def add(self, a: Value, b: Value) -> Value:
        """Add two values, fused into the later of the two layers that compute them: its other operand is ready."""
        first, last = sorted((a, b), key=lambda v: v.step.place if v.step else -1)
        step = last.step
        fits = step and last.uses == 1 and step.open and step.residual is None and a is not b
        if step and fits and step.op.kind in ("conv", "linear"):
            step.residual = first
            return last
        return self.step(Op("map", ()), [a, b])

    def finish(self, output: Value, rank: int) -> Network:
        output.uses += 1
        self.make_twins(output)
        numbers: dict[Value, int] = {self.input: 0}
        made = {v.step: v for v in self.values(output)}
        for step in self.steps:
            step.op.inputs = tuple(numbers[v] for v in step.inputs)
            step.op.residual = numbers[step.residual] if step.residual else -1
            step.op.arrays = {name: np.asarray(array, ARRAYS[name]) for name, array in step.arrays.items()}
            count = 1 + max(numbers.values())
            if step in made:
                numbers[made[step]] = count
            if step.twin is not None:
                step.op.twin = 1
                numbers[step.twin] = count + 1
        return self.network(output, rank, numbers)

    def network(self, output: Value, rank: int, numbers: dict[Value, int]) -> Network:
        """Return the network; its output must be the last operator's, so another one is copied at the end."""
        ops = [step.op for step in self.steps]
        if not self.steps or output.step is not self.steps[-1] or output is self.steps[-1].twin:
            ops.append(Op("map", (numbers[output],)))
        shape = self.shape if len(self.shape) == 3 else (*self.shape, 1, 1)
        return Network((shape[0], shape[1], shape[2]), ops, len(self.shape) + 1, rank)

    def values(self, output: Value) -> Sequence[Value]:
        read: list[Any] = [v for s in self.steps for v in (*s.inputs, s.residual) if v is not None]
        twins = {s.twin for s in self.steps}
        return [v for v in (*read, output) if v not in twins and v.step is not None]

    def make_twins(self, output: Value) -> None:
        """Fuse a map after a convolution as the convolution's second output, stored while the sums are in registers
        (pre-activation networks: the shortcut reads the raw sum, the next layer the normalised one)."""
        kept: list[Step] = []
        for step in self.steps:
            source = step.inputs[0].step
            single = step.op.kind == "map" and len(step.inputs) == 1 and "scale" in step.arrays
            if not (single and source and source.op.kind == "conv" and source.twin is None) or step.inputs[0] in {
                s.twin for s in self.steps
            }:
                kept.append(step)
                continue
            source.twin = next(v for v in self.values(output) if v.step is step)
            source.op.twin_act = step.op.act
            source.arrays |= {"twin_scale": step.arrays["scale"], "twin_shift": step.arrays["shift"]}
            source.twin.step = source
        self.steps = kept
