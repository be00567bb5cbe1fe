"""Remove dead filters: smaller layers, the same function.

The output of a dead filter is a constant k (its batch norm's shift). Where a layer without zero padding reads it, k is
folded into the bias: b' = b + sum_c k_c sum(w[:, c]). With zero padding the constant ends at the image's edge, so all
constant channels become one channel of ones that is padded like any other: w' = sum_c k_c w[:, c]. Both are exact for
every image size, but a size that ``forward`` reads is traced as a number: such a network runs at the example's size
only. In a residual sum a branch computes only its live channels and `Widen` inserts the constant ones.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dcil.errors import UserError
from dcil.export.compact.channels import Flow, analyse, operands, spans, traced, wanted
from dcil.export.compact.layers import Cut, Select, Widen, attribute, bias_of, replace, resize
from dcil.export.compact.operators import Kind, padded, weight_of, where


@dataclass(frozen=True)
class Compact:
    """``model`` computes what the large network computes; ``left`` names what could not be made smaller, and why."""

    model: fx.GraphModule
    cuts: dict[str, Cut]
    left: list[str]


def compact(model: nn.Module, example: Tensor | tuple[Tensor, ...], block: int = 1) -> Compact:
    """Return the smaller form of a finalized ``model``; of ``example``, an input, only the shape matters.

    block    1 gives the fewest parameters. CPU engines compute 8 or 16 channels at once and fall back to slow code
             for other counts: with ``block=8`` as many dead filters stay as fill the last eight.
    """
    if block < 1:
        raise UserError(f"block must be >= 1, got {block}")
    inputs = tuple(x.detach().cpu() for x in (example if isinstance(example, tuple) else (example,)))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    large = traced(model, inputs).cpu()
    with torch.no_grad():
        small = _Builder(large, analyse(large, inputs, block)).build()
    small.model.to(device)
    return small


class _Builder:
    """Builds the small graph node by node; ``layout`` has the large network's channels that a new node holds."""

    def __init__(self, traced: fx.GraphModule, flows: dict[fx.Node, Flow]) -> None:
        self.traced, self.flows = traced, flows
        self.modules: dict[str, nn.Module] = dict(traced.named_modules())
        self.graph = fx.Graph()
        self.parts: dict[str, Any] = {}
        self.new: dict[fx.Node, fx.Node] = {}
        self.layout: dict[fx.Node, Tensor] = {}
        self.cuts: dict[str, Cut] = {}
        self.left: list[str] = []

    def build(self) -> Compact:
        for node in self.traced.graph.nodes:
            if self.flows[node].exists:
                self.add(node)
        self.graph.lint()
        model = fx.GraphModule(self.parts, self.graph, type(self.traced).__name__)
        return Compact(model.eval(), self.cuts, self.left)

    def add(self, node: fx.Node) -> None:
        flow = self.flows[node]
        kind = flow.kind
        if kind is Kind.CONV:
            self.conv(node)
        elif kind is Kind.DEPTHWISE:
            self.depthwise(node)
        elif kind is Kind.JOIN:
            self.join(node, flow.keep.nonzero()[:, 0])
        elif kind is Kind.CAT:
            self.cat(node)
        elif kind in (Kind.NORM, Kind.CHANNELWISE):
            self.copy(node, self.new.__getitem__, self.layout[operands(node)[0]])
            if kind is Kind.NORM:
                self.norm(node)
        elif kind is Kind.FLATTEN:
            size = len(flow.live) // len(self.flows[operands(node)[0]].live)
            channels = self.layout[operands(node)[0]]
            self.copy(node, self.new.__getitem__, (channels[:, None] * size + torch.arange(size)).flatten())
        elif kind is Kind.SHAPE:
            self.copy(node, self.new.__getitem__)
        else:
            self.whole(node)

    # -- graph ------------------------------------------------------------------------------------------------------

    def copy(self, node: fx.Node, take: Any, layout: Tensor | None = None) -> None:
        """Copy an operation onto new inputs."""
        new = self.graph.node_copy(node, take)
        if node.op == "call_module":
            new.target = self.place(str(node.target), copy.deepcopy(self.modules[str(node.target)]))
        elif node.op == "get_attr":
            self.parts[str(node.target)] = attribute(self.traced, str(node.target))
            self.cuts[str(node.target)] = Cut(str(node.target))
        self.new[node] = new
        if layout is not None:
            self.layout[node] = layout

    def place(self, name: str, part: Any) -> str:
        """Store ``part`` and return its name; a module that is called twice becomes two."""
        names = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(2)))
        free = next(n for n in names if n not in self.parts)
        self.parts[free] = part
        return free

    def call(self, name: str, module: nn.Module, x: fx.Node) -> fx.Node:
        return self.graph.call_module(self.place(name, module), (x,))

    def function(self, node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
        """Call the function of ``node`` on other arguments."""
        assert callable(node.target)
        return self.graph.call_function(node.target, args)

    def adapt(self, node: fx.Node, target: Tensor) -> fx.Node:
        """Return the new ``node`` with the large network's channels ``target``."""
        layout, flow = self.layout[node], self.flows[node]
        if torch.equal(layout, target):
            return self.new[node]
        place = torch.full((len(flow.live),), -1)
        place[layout] = torch.arange(len(layout))
        order = place[target]
        missing = order < 0
        if not missing.any():
            return self.call(f"select_{node.name}", Select(order), self.new[node])
        order[missing] = len(layout) + torch.arange(int(missing.sum()))
        return self.call(f"widen_{node.name}", Widen(order, self.constants(flow, target[missing])), self.new[node])

    def constants(self, flow: Flow, channels: Tensor) -> Tensor:
        """Return the constants of these channels, shaped (1, channels, 1, ...)."""
        shape = (1, len(channels), *[1] * (len(flow.shape) - 2))
        return flow.constants()[channels].reshape(shape).to(self.dtype())

    def dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.traced.parameters() if p.is_floating_point()), torch.get_default_dtype())

    # -- the layers --------------------------------------------------------------------------------------------------

    def conv(self, node: fx.Node) -> None:
        """Add a Conv or Linear: live filters over the channels that exist, constants folded."""
        source, name = operands(node)[0], str(node.target)
        module = copy.deepcopy(self.modules[name])
        x, flow, columns = self.new[source], self.flows[source], self.layout[source]
        rows = self.flows[node].keep.nonzero()[:, 0]
        gone = torch.ones_like(flow.live).index_fill(0, columns, False) & ~flow.live
        wide = weight_of(module)[rows]
        folded = torch.tensordot(wide.transpose(0, 1)[gone], flow.constants()[gone], ([0], [0]))  # (rows, kernel...)
        weight, bias = wide.index_select(1, columns), bias_of(module, rows)
        edge = padded(module) and bool(folded.any())
        if edge and (carrier := self.carrier(flow, columns, gone)) is not None:
            weight[:, carrier] += folded / flow.constants()[columns[carrier]]
            edge, folded = False, torch.zeros_like(folded)
        if edge:
            x = self.graph.call_function(F.pad, (x, [0, 0] * (wide.ndim - 2) + [0, 1], "constant", 1.0))
            weight = torch.cat([weight, folded[:, None]], 1)
        elif folded.any():
            bias = (0 if bias is None else bias) + folded.reshape(len(rows), -1).sum(1)
        resize(module, weight, bias)
        place = self.place(name, module)
        self.new[node], self.layout[node] = self.graph.call_module(place, (x,)), rows
        self.cuts[f"{place}.weight"] = Cut(f"{name}.weight", rows, columns, int(edge))
        if self.modules[name].bias is not None:
            self.cuts[f"{place}.bias"] = Cut(f"{name}.bias", rows)

    def carrier(self, flow: Flow, columns: Tensor, gone: Tensor) -> int | None:
        """Return the index in ``columns`` of a constant channel that can carry the removed ones, if any."""
        size = torch.where(flow.live, 0.0, flow.constants().abs())
        best = int(size[columns].argmax())
        # A much smaller constant would need huge weights.
        return best if size[columns[best]] > 0.1 * size[gone].max() else None

    def depthwise(self, node: fx.Node) -> None:
        source, name = operands(node)[0], str(node.target)
        module: Any = copy.deepcopy(self.modules[name])
        rows = self.flows[node].keep.nonzero()[:, 0]
        resize(module, weight_of(module)[rows], bias_of(module, rows))
        module.groups = module.in_channels = len(rows)
        place = self.place(name, module)
        self.new[node], self.layout[node] = self.graph.call_module(place, (self.adapt(source, rows),)), rows
        self.cuts |= {f"{place}.{key}": Cut(f"{name}.{key}", rows) for key, _ in module.named_parameters()}

    def norm(self, node: fx.Node) -> None:
        place, rows = str(self.new[node].target), self.layout[node]
        module = self.parts[place]
        module.num_features = len(rows)
        for key, values in [*module.named_parameters(), *module.named_buffers()]:
            if values.ndim:
                replace(module, key, values.detach()[rows])
        self.cuts |= {f"{place}.{key}": Cut(f"{node.target}.{key}", rows) for key, _ in module.named_parameters()}

    def join(self, node: fx.Node, target: Tensor) -> None:
        """Add a sum of two tensors, or of one tensor and the constants that remain of the other."""
        sides = []
        for i, source in enumerate(operands(node)):
            if wanted(node, i, self.flows):
                sides.append(self.adapt(source, target))
            else:
                constants = self.constants(self.flows[source], target)
                sides.append(self.graph.get_attr(self.place(f"constant_{source.name}", constants)))
        self.new[node], self.layout[node] = self.function(node, tuple(sides)), target

    def cat(self, node: fx.Node) -> None:
        spots = zip(operands(node), spans(node, self.flows), strict=True)
        parts = [(n, span.start) for i, (n, span) in enumerate(spots) if wanted(node, i, self.flows)]
        self.new[node] = self.function(node, ([self.new[n] for n, _ in parts], 1))
        self.layout[node] = torch.cat([self.layout[n] + start for n, start in parts])

    def whole(self, node: fx.Node) -> None:
        """Copy an input, an output or an unknown operation with all channels of the large network."""
        shrunk = False

        def take(source: fx.Node) -> fx.Node:
            nonlocal shrunk
            flow = self.flows[source]
            if not flow.shape or source not in self.layout:
                return self.new[source]
            shrunk |= bool((~flow.live).any())
            return self.adapt(source, torch.arange(len(flow.live)))

        shape = self.flows[node].shape
        self.copy(node, take, torch.arange(shape[1]) if shape else None)
        if node.op == "call_module":
            place = str(self.new[node].target)
            named = self.parts[place].named_parameters()
            self.cuts |= {f"{place}.{key}": Cut(f"{node.target}.{key}") for key, _ in named}
            shrunk |= any(not row.any() for p in self.parts[place].parameters() if p.ndim > 1 for row in p)
        if shrunk and self.flows[node].kind is Kind.OTHER:
            self.left.append(f"{where(node, self.modules)}: not an operation that can be made smaller")
