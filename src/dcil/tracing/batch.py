"""Trace a network at several batch sizes, so that its graph holds for all of them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Graph, Node

from dcil.tracing.tracer import Tracer, TracingError, is_torch_module, map_items, named, place_of

#: Far apart, so that a number that is the same at both (n // 2 at 2 and 3) does not depend on the batch.
BATCH_SIZES = (2, 7)


def trace(
    model: nn.Module,
    example: Tensor | Sequence[Tensor],
    *,
    training: bool | None = None,
    leaf: Callable[[nn.Module], bool] = is_torch_module,
    sizes: Sequence[int] = BATCH_SIZES,
) -> fx.GraphModule:
    """Return ``model`` as a graph that computes the same for every batch size; ``model`` itself is not changed.

    example     an input, or several: only shapes and types count, and the first dimension is the batch
    training    the mode to trace in; None: as the model is
    leaf        the modules inside the model that become one ``call_module`` node each; the graph calls the model's own
    sizes       the batch sizes that are tried; with 1 among them, a network that treats one image otherwise is refused

    All other nodes are ``call_function`` of ATen operators, none of which works in place, and ``get_attr`` of
    parameters, buffers and other tensors. ``meta["shape"]`` is the shape of a result, or of the first of several, at
    the first size; ``meta["module"]`` is the name and class of the module that called the operator. Nothing is
    computed, and no device is used.
    """
    examples = (example,) if isinstance(example, Tensor) else tuple(example)
    tracers = [run(model, examples, size, training, leaf) for size in sizes]
    graph = tracers[0].graph
    try:
        unify([tracer.graph for tracer in tracers], sizes)
    except TracingError as error:
        raise TracingError(f"{type(model).__name__} cannot be traced: {error}") from None
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
    names = [str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")]
    root = {name: attribute(model, tracers[0], name) for name in names}
    graph.lint()
    traced = fx.GraphModule(root, graph, type(model).__name__)
    traced.training = model.training if training is None else training
    return traced


def run(
    model: nn.Module,
    examples: tuple[Tensor, ...],
    size: int,
    training: bool | None,
    leaf: Callable[[nn.Module], bool],
) -> Tracer:
    """Trace one call of the model with a batch of ``size``."""
    tracer = Tracer(model, leaf, examples[0].device)
    if training is not None:
        tracer.model.train(training)
    inputs = [torch.empty(size, *x.shape[1:], dtype=x.dtype, device="meta") for x in examples]
    for i, x in enumerate(inputs):
        tracer.define(x, tracer.graph.placeholder("x" if len(inputs) == 1 else f"x_{i + 1}"))
    try:
        with torch.no_grad(), tracer:
            out = tracer.model(*inputs)
        tracer.settle()
        tracer.graph.output(tracer.nodes(out))
    except Exception as error:  # the network's own code runs here on tensors without data: it may raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise TracingError(
            f"{type(model).__name__} cannot be traced: in {named(*tracer.modules[-1])}, {reason}"
        ) from error
    return tracer


def attribute(model: nn.Module, tracer: Tracer, name: str) -> Any:
    """A module, parameter or buffer of the model, or a constant that the tracer met."""
    return tracer.constants[name] if name in tracer.constants else operator.attrgetter(name)(model)


def unify(graphs: Sequence[Graph], sizes: Sequence[int]) -> None:
    """Write numbers that differ between the graphs by multiples of the batch size as such into the first one."""
    first, *others = ([*graph.nodes] for graph in graphs)
    for size, nodes in zip(sizes[1:], others, strict=True):
        for one, other in itertools.zip_longest(first, nodes):
            if one is None or other is None or (one.op, one.target) != (other.op, other.target):
                calls = [f"{node.target} in {place_of(node)}" if node else "nothing" for node in (one, other)]
                raise TracingError(
                    f"it does not treat one batch as another: with a batch of {sizes[0]} it calls {calls[0]}, "
                    f"where with a batch of {size} it calls {calls[1]}"
                )
    batch = BatchNumbers(graphs[0], sizes)
    for node, *same in zip(first, *others, strict=True):
        if node.op != "placeholder":
            node.args = batch.unified([node.args, *(n.args for n in same)], node)
            node.kwargs = batch.unified([node.kwargs, *(n.kwargs for n in same)], node)


class BatchNumbers:
    """The numbers in a graph that depend on the batch size."""

    def __init__(self, graph: Graph, sizes: Sequence[int]) -> None:
        self.graph, self.sizes = graph, sizes
        self.multiples: dict[int, Node] = {}

    def unified(self, values: Sequence[Any], reader: Node) -> Any:
        """The argument of ``reader`` that is each of ``values`` at its batch size."""
        first = values[0]
        if isinstance(first, Node):
            if all(isinstance(v, Node) and v.name == first.name for v in values):
                return first
        elif isinstance(first, (tuple, list)) and all(type(v) is type(first) and len(v) == len(first) for v in values):
            items = zip(*values, strict=True)
            return map_items(lambda _: self.unified(next(items), reader), first)
        elif isinstance(first, dict):
            return {key: self.unified([v[key] for v in values], reader) for key in first}
        elif all(type(v) is type(first) and v == first for v in values):
            return first
        elif all(type(v) is int for v in values):
            factor, rest = divmod(first, self.sizes[0])
            if not rest and all(v == factor * size for v, size in zip(values, self.sizes, strict=True)):
                return self.multiple(factor)
        given = ", ".join(f"{value} with a batch of {size}" for value, size in zip(values, self.sizes, strict=True))
        raise TracingError(f"{reader.target} in {place_of(reader)} depends on the size of the batch: {given}")

    def multiple(self, factor: int) -> Node:
        """The batch size times ``factor``."""
        if factor not in self.multiples:
            inputs = [n for n in self.graph.nodes if n.op == "placeholder"]
            before = inputs[-1] if factor == 1 else self.multiple(1)
            with self.graph.inserting_after(before):
                self.multiples[factor] = (
                    self.graph.call_function(torch.ops.aten.sym_size.int, (inputs[0], 0))
                    if factor == 1
                    else self.graph.call_function(operator.mul, (before, factor))
                )
        return self.multiples[factor]
