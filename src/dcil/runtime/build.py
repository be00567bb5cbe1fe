"""Build plan operators: fold norm layers, fuse activations and additions, number the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcil_runtime import Input, Network, Op, Output
from dcil_runtime.format import ARRAYS, NO_ACTIVATION, Activation, plan_shape

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

    def __init__(self, inputs: Sequence[Input]) -> None:
        self.ports = list(inputs)
        self.inputs = [Value(None, 2) for _ in inputs]
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

    def take(self, values: list[Value], index: NDArray[Any], shape: tuple[int, ...]) -> Value:
        """Take numbers, numbered through all of ``values``, in any order."""
        result = self.step(Op("take", (), shape=shape), values)  # type: ignore[arg-type]
        assert result.step is not None
        result.step.arrays = {"index": index.reshape(-1)}
        return result

    def constant(self, numbers: Array) -> Value:
        """Add a tensor [c, h, w] that is the same for every item."""
        result = self.step(Op("constant", (), shape=numbers.shape), [])
        assert result.step is not None
        result.step.arrays = {"table": numbers.reshape(-1)}
        return result

    def embedding(self, value: Value, table: Array, length: int) -> Value:
        result = self.step(Op("embedding", (), shape=(table.shape[1], 1, length)), [value])
        assert result.step is not None
        result.step.arrays = {"table": table.reshape(-1)}
        return result

    def resize(self, kind: str, value: Value, weight: Array, shape: tuple[int, int, int]) -> Value:
        """Replace the rows, or columns, of images by sums of them; ``weight`` is [after, before]."""
        result = self.step(Op(kind, (), shape=shape), [value])
        assert result.step is not None
        result.step.arrays = {"weight": weight}
        return result

    def attention(
        self,
        values: list[Value],
        channels: Any,
        heads: tuple[int, int, int],
        scale: float,
        tokens: Any,
        table: Any,
        keys: bool,
    ) -> Value:
        """Add an attention; ``heads`` is their number and the channels of a query and of a value, ``tokens`` their
        pixels by window, ``table`` what is added to the scores."""
        count, depth, width = heads
        window = (depth, width, 1, 1, 0, 0, 0, 0, 1, 1)
        shape = (1, 1, tokens.shape[1]) if table is None else (*table.shape[:2], tokens.shape[1])
        op = Op("attention", (), window, count, int(keys), number=scale, shape=shape)
        result = self.step(op, values)
        assert result.step is not None
        result.step.arrays = {"index": channels}
        if tokens.flatten().tolist() != list(range(tokens.numel())):
            result.step.arrays["tokens"] = tokens.flatten().numpy()
        if table is not None:
            result.step.arrays["table"] = table.flatten().numpy()
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

    def finish(self, outputs: Sequence[Value], shapes: Sequence[tuple[int, ...]]) -> Network:
        for output in outputs:
            output.uses += 1
        self.drop_unused(outputs)
        self.make_twins(outputs)
        numbers: dict[Value, int] = {value: i for i, value in enumerate(self.inputs)}
        made = {v.step: v for v in self.values(outputs)}
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
        return self.network(outputs, shapes, numbers)

    def drop_unused(self, outputs: Sequence[Value]) -> None:
        """Drop the steps whose results nobody reads."""
        read = {v.step for v in outputs}
        kept: list[Step] = []
        for step in reversed(self.steps):
            if step in read:
                kept.append(step)
                read |= {v.step for v in (*step.inputs, step.residual) if v is not None}
        self.steps = kept[::-1]

    def network(
        self, outputs: Sequence[Value], shapes: Sequence[tuple[int, ...]], numbers: dict[Value, int]
    ) -> Network:
        """Return the network; where it has one output, that must be the last operator's, so another is copied."""
        ops = [step.op for step in self.steps]
        first = plan_shape(self.ports[0].shape)
        single = len(self.ports) == len(outputs) == 1 and self.ports[0].type == "float32"
        if not single or len(self.ports[0].shape) == 2 or len(shapes[0]) not in (1, 3):
            found = [Output(numbers[v], shape) for v, shape in zip(outputs, shapes, strict=True)]
            return Network(first, ops, inputs=self.ports, outputs=found)
        if not self.steps or outputs[0].step is not self.steps[-1] or outputs[0] is self.steps[-1].twin:
            ops.append(Op("map", (numbers[outputs[0]],)))
        return Network(first, ops, len(self.ports[0].shape) + 1, len(shapes[0]) + 1)

    def values(self, outputs: Sequence[Value]) -> Sequence[Value]:
        read: list[Any] = [v for s in self.steps for v in (*s.inputs, s.residual) if v is not None]
        twins = {s.twin for s in self.steps}
        return [v for v in (*read, *outputs) if v not in twins and v.step is not None]

    def make_twins(self, outputs: Sequence[Value]) -> None:
        """Fuse a map after a convolution as the convolution's second output, stored while the sums are in registers
        (pre-activation networks: the shortcut reads the raw sum, the next layer the normalised one)."""
        kept: list[Step] = []
        for step in self.steps:
            source = step.inputs[0].step if step.inputs else None
            single = step.op.kind == "map" and len(step.inputs) == 1 and "scale" in step.arrays
            if not (single and source and source.op.kind == "conv" and source.twin is None) or step.inputs[0] in {
                s.twin for s in self.steps
            }:
                kept.append(step)
                continue
            source.twin = next(v for v in self.values(outputs) if v.step is step)
            source.op.twin_act = step.op.act
            source.arrays |= {"twin_scale": step.arrays["scale"], "twin_shift": step.arrays["shift"]}
            source.twin.step = source
        self.steps = kept
