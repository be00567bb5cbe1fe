"""Find the channels of a traced network that carry information, and the constants of the others.

Forward: a filter without weights outputs a constant, and batch norms, activations, pooling and additions map constants
to constants (relu(beta - gamma * mean / sqrt(var + eps)) after a norm layer). Each operation is run, in double, on the
constants themselves, so no rule about its arithmetic is written twice.
Backward: a channel is needed if a non-zero weight, or the output, reads it.
"""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from dcil.export.compact.operators import FIRST_RESULT_ALONE, Kind, kind_of, name_of, padded, weight_of
from dcil.tracing import BATCH_SIZES, trace


@dataclass
class Flow:
    """One tensor of the network, by channel."""

    kind: Kind
    value: Any  # (1, channels, ...): the constants where not live, 0 where live; or whatever is not a tensor
    shape: tuple[int, ...] = ()
    live: Tensor = field(default_factory=lambda: torch.ones(0, dtype=torch.bool))
    need: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    exists: bool = False  # in the small network
    fill: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))  # constant, yet to be there
    block: int = 1

    @property
    def keep(self) -> Tensor:
        """Return the channels to compute: live and needed ones, and constant ones up to whole blocks; at least one."""
        keep = self.live & self.need | self.fill
        short = -int(keep.sum()) % self.block if self.kind in (Kind.CONV, Kind.JOIN) else 0
        spare = (~self.live & ~keep).nonzero()[:, 0]
        strongest = spare[self.constants()[spare].abs().argsort(descending=True, stable=True)]
        keep[strongest[: max(short, int(not keep.any()))]] = True
        if not keep.any():
            keep[0] = True
        return keep

    def constants(self) -> Tensor:
        """Return the constant of each channel that is not live, (channels,)."""
        first: Tensor = self.value.flatten(2)[0, :, 0] if self.value.ndim > 2 else self.value[0]
        return first


def traced(model: nn.Module, inputs: tuple[Tensor, ...]) -> fx.GraphModule:
    """Return a copy of the network in evaluation as a graph of torch's own modules and ATen operators."""
    graph = trace(copy.deepcopy(model), inputs, training=False, sizes=(*BATCH_SIZES, 1))
    for module in graph.modules():
        if getattr(module, "inplace", False):
            module.inplace = False  # type: ignore[assignment]  # other nodes may read the input
    for node in graph.graph.nodes:
        if node.target in FIRST_RESULT_ALONE and all(user.args[1] == 0 for user in node.users):
            node.target = FIRST_RESULT_ALONE[node.target]
            for user in list(node.users):
                user.replace_all_uses_with(node)
                graph.graph.erase_node(user)
    graph.recompile()
    return graph


@torch.no_grad()
def analyse(graph: fx.GraphModule, example: tuple[Tensor, ...], block: int) -> dict[fx.Node, Flow]:
    """Compute the flow of every node; of ``example`` only the shapes matter."""
    double = copy.deepcopy(graph).double()
    modules = dict(double.named_modules())
    one = tuple(x[:1].double() if x.is_floating_point() else x[:1] for x in example)
    shapes = _Recorder(double)
    shapes.run(*one)
    # The copy has nodes of its own: read its values through their order.
    pairs = dict(zip(graph.graph.nodes, double.graph.nodes, strict=True))
    flows: dict[fx.Node, Flow] = {}
    values = {node: shapes.seen[twin] for node, twin in pairs.items()}
    for node in graph.graph.nodes:
        flows[node] = forward(node, shapes, modules, values, flows)
        flows[node].block = block
    for node in reversed(graph.graph.nodes):
        backward(node, modules, flows)
    return flows


class _Recorder(fx.Interpreter):
    """Runs the network and records the value of every node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.seen: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.seen[n] = super().run_node(n)
        return self.seen[n]


def forward(
    node: fx.Node,
    runner: fx.Interpreter,
    modules: dict[str, nn.Module],
    values: dict[fx.Node, Any],
    flows: dict[fx.Node, Flow],
) -> Flow:
    """Run the operation on the constants of its inputs; outputs that no live channel reaches are constant."""
    kind, example = kind_of(node, modules, values), values[node]
    if not isinstance(example, Tensor) or example.ndim < 2 or kind is Kind.OUTPUT:
        return Flow(kind, example)
    shape = tuple(example.shape)
    everything = torch.ones(shape[1], dtype=torch.bool)
    if kind in (Kind.INPUT, Kind.OTHER):
        return Flow(kind, torch.zeros_like(example), shape, everything, ~everything, fill=~everything)
    value = run_alone(node, runner, flows)
    live = touched(node, kind, modules, flows) | ~uniform(value)
    value = torch.where(live.reshape(1, -1, *[1] * (value.ndim - 2)), 0.0, value)
    return Flow(kind, value, shape, live, ~everything, fill=~everything)


def run_alone(node: fx.Node, runner: fx.Interpreter, flows: dict[fx.Node, Flow]) -> Tensor:
    """Run the node's operation on the values in ``flows``."""
    args, kwargs = (fx.map_arg(given, lambda n: flows[n].value) for given in (node.args, node.kwargs))
    out: Tensor = getattr(runner, node.op)(node.target, args, kwargs)
    return out


def uniform(value: Tensor) -> Tensor:
    """Return which channels have the same value everywhere in the image."""
    image = value.reshape(value.shape[1], -1)
    return (image.amax(1) - image.amin(1)) <= 1e-12 * image.abs().amax(1)


def touched(node: fx.Node, kind: Kind, modules: dict[str, nn.Module], flows: dict[fx.Node, Flow]) -> Tensor:
    """Return the channels reached by a live channel of an input, or by the edge where padding meets a constant one."""
    inputs = [flows[n] for n in node.all_input_nodes if flows[n].shape]
    first = inputs[0]
    if kind in (Kind.CONV, Kind.DEPTHWISE):
        module = modules[str(node.target)]
        reach = first.live | (first.constants() != 0) if padded(module) else first.live
        used = weight_of(module) != 0
        used = used.flatten(2).any(2) if used.ndim > 2 else used
        return used[:, reach].any(1) if kind is Kind.CONV else used[:, 0] & reach
    if kind is Kind.FLATTEN:
        return first.live.repeat_interleave(math.prod(first.shape[2:]))
    if kind is Kind.CAT:
        return torch.cat([flows[n].live for n in operands(node)])
    if kind is Kind.JOIN:
        both = [flows[n] for n in operands(node)]
        live = both[0].live | both[1].live
        if name_of(node) == "mul":  # what is multiplied by a constant 0 is 0
            for flow in both:
                live &= flow.live | (flow.constants() != 0)
        return live
    return first.live


def operands(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that ``node`` reads, in order and with repetition (x + x)."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda n: found.append(n) or n)  # type: ignore[func-returns-value]
    return found


def spans(node: fx.Node, flows: dict[fx.Node, Flow]) -> list[slice]:
    """Return the channels of a cat that come from each operand."""
    ends = list(itertools.accumulate((len(flows[n].live) for n in operands(node)), initial=0))
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def backward(node: fx.Node, modules: dict[str, nn.Module], flows: dict[fx.Node, Flow]) -> None:
    """Mark what ``node`` needs of its inputs; all readers of ``node`` must have been visited."""
    flow = flows[node]
    flow.exists |= flow.kind in (Kind.OUTPUT, Kind.INPUT)
    if not flow.exists or flow.kind is Kind.INPUT:
        return
    for i, source in enumerate(operands(node)):
        before = flows[source]
        before.exists |= wanted(node, i, flows)
        if not before.shape or flow.kind is Kind.SHAPE:
            continue
        if flow.kind in (Kind.OUTPUT, Kind.OTHER):
            before.need |= True
        elif flow.kind is Kind.CONV:
            used = weight_of(modules[str(node.target)])[flow.keep] != 0
            before.need |= used.transpose(0, 1).flatten(1).any(1)
        elif flow.kind is Kind.FLATTEN:
            before.need |= flow.keep.reshape(len(before.live), -1).any(1)
            before.fill |= flow.fill.reshape(len(before.live), -1).any(1)
        elif flow.kind is Kind.CAT:
            before.need |= flow.keep[spans(node, flows)[i]]
            before.fill |= flow.fill[spans(node, flows)[i]]
        else:
            before.need |= flow.keep
            if flow.kind in (Kind.NORM, Kind.CHANNELWISE):
                # A padded average makes a constant vary at the edges, so its channel must exist.
                before.fill |= flow.fill | flow.live & flow.need & ~before.live
            elif flow.kind is Kind.JOIN and flow.block > 1 and comes_from_conv(source, flows):
                # From half of a branch on, empty filters in whole blocks are faster than widening.
                share = (before.live & flow.keep).sum() / flow.keep.sum()
                before.fill |= flow.keep & (share >= 0.5)


def comes_from_conv(node: fx.Node, flows: dict[fx.Node, Flow]) -> bool:
    while flows[node].kind in (Kind.NORM, Kind.CHANNELWISE):
        node = operands(node)[0]
    return flows[node].kind is Kind.CONV


def wanted(node: fx.Node, i: int, flows: dict[fx.Node, Flow]) -> bool:
    """Return whether ``node`` reads its operand ``i`` in the small network; a sum adds constant ones as numbers."""
    flow, parts = flows[node], [flows[n] for n in operands(node)]
    if flow.kind is Kind.JOIN:
        carried = parts[1 - i].shape == flow.shape and bool((flow.live & flow.need).any())
        return not carried or bool((parts[i].live & flow.keep).any())
    if flow.kind is Kind.CAT:
        there = flow.fill | flow.live & flow.need
        alive = [bool(there[span].any()) for span in spans(node, flows)]
        return alive[i] if any(alive) else i == 0
    return True
