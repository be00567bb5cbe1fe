"""Lower a torch module to the operators of a plan: the traced graph has ATen operators, each with a rule in rules/."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from dcil.errors import UserError
from dcil.runtime.build import Builder, Value
from dcil.runtime.forms import Placed, image_shape
from dcil.runtime.nodes import MADE, depends_on_batch, name_of, shape_of
from dcil.runtime.operands import Operands
from dcil.runtime.rules import RULES
from dcil.runtime.rules.attention import attentions
from dcil.runtime.rules.moves import MOVES
from dcil.tracing import place_of, trace
from dcil_runtime import Input, Network

#: Of inputs: the types of torch, and what a plan calls them.
TYPES = {torch.float32: "float32", torch.int64: "int64"}
#: Operators that give a constant with a batch, whose items stay equal.
WITH_BATCH = {*MOVES.split(), *MADE, *("add", "mul", "masked_fill", "where", "_to_copy", "cat", "getitem", "embedding")}


def lower(model: nn.Module, example: Tensor | Sequence[Tensor]) -> Network:
    """Return the network in evaluation as plan operators, norm layers folded, activations and additions fused.

    example    an input, or several: float32 with 2 to 4 dimensions, or int64 [n, length], the batch first
    """
    examples = (example,) if isinstance(example, Tensor) else tuple(example)
    for x in examples:
        if x.dtype not in TYPES or not 2 <= x.ndim <= (4 if x.dtype == torch.float32 else 2):
            raise UserError(
                f"an example input must be float32 with 2 to 4 dimensions or int64 with 2, got {x.dtype} with {x.ndim}"
            )
    with torch.no_grad():
        traced = trace(model, examples, training=False, leaf=lambda module: False)
        return Lowering(traced, [TYPES[x.dtype] for x in examples]).run()


class Lowering(Operands):
    """One pass over the graph: what depends on the input is placed in the plan, everything else is computed here."""

    def __init__(self, traced: fx.GraphModule, types: Sequence[str]) -> None:
        self.traced, self.nodes = traced, list(traced.graph.nodes)
        sources = [node for node in self.nodes if node.op == "placeholder"]
        self.inputs = [Input(shape_of(node)[1:], kind) for node, kind in zip(sources, types, strict=True)]
        super().__init__(Builder(self.inputs))
        self.batched: set[Node] = set()  # constants with a batch
        for source, value in zip(sources, self.builder.inputs, strict=True):
            self.values[source] = self.plain(value, shape_of(source))

    def run(self) -> Network:
        for node in self.nodes:
            self.fold(node)
        self.attentions, self.inside = attentions(self)
        self.refuse_unknown()
        for node in self.nodes:
            if self.computes(node):
                self.place(node)
        results = list(results_of(self.nodes[-1].args[0]))
        if not results or any(not isinstance(self.values.get(r), Placed) for r in results):
            raise UserError("the network must return tensors that depend on its input")
        outputs = [self.result(node) for node in results]
        return self.builder.finish(outputs, [shape_of(node)[1:] for node in results])

    def result(self, node: Node) -> Value:
        """Return an output with its elements in order."""
        if image_shape(shape_of(node)) is not None:
            return self.image(node, node)
        placed, size = self.placed(node, node), math.prod(shape_of(node)[1:])
        return self.copied(node, node, placed.places(shape_of(node)), (size, 1, 1))

    def place(self, node: Node) -> None:
        """Add what the plan needs for a node; a rule returns where its result, or each of several, lies."""
        found = RULES[name_of(node)](self, node)
        if isinstance(found, Value):
            found = self.plain(found, shape_of(node))
        self.values[node] = found
        for placed in found if isinstance(found, list) else [found]:
            self.builder.uses(placed.value, len(node.users))

    def fold(self, node: Node) -> None:
        """Compute a node that depends on parameters, other constants and the size of the batch alone."""
        if node.op == "get_attr":
            tensor: Tensor = operator.attrgetter(str(node.target))(self.traced)
            self.constants[node] = tensor.detach().cpu()
        elif node.op == "call_function" and "shape" in node.meta:
            sizes = [n for n in node.all_input_nodes if n not in self.constants]
            batched = bool(sizes) or any(n in self.batched for n in node.all_input_nodes)
            fits = name_of(node) in WITH_BATCH and not depends_on_batch(node)
            random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if random or any("shape" in n.meta or n.op == "placeholder" for n in sizes) or (batched and not fits):
                return
            args, kwargs = fx.map_arg(node.args, self.number), fx.map_arg(node.kwargs, self.number)
            self.constants[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            self.batched |= {node} if batched else set()

    def computes(self, node: Node) -> bool:
        """Return whether the plan needs an operator for it; a plan has no batch, so sizes of the batch need none."""
        known = node in self.constants or node in self.inside
        return node.op == "call_function" and not known and "shape" in node.meta

    def refuse_unknown(self) -> None:
        unknown = [n for n in self.nodes if self.computes(n) and name_of(n) not in RULES]
        if unknown:
            named = ", ".join(dict.fromkeys(f"{name_of(n)} in {place_of(n)}" for n in unknown))
            raise UserError(f"no CPU kernel for {named}; there are kernels for {', '.join(sorted(RULES))}")


def results_of(out: Any) -> Iterator[Any]:
    """Yield the tensors that a network returns: one, or those of a nest of tuples and mappings, in their order."""
    if isinstance(out, dict):
        out = tuple(out.values())
    if isinstance(out, (tuple, list)):
        for item in out:
            yield from results_of(item)
    elif out is not None:
        yield out
