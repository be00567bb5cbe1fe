"""Rewrite a traced convolutional network for the GPU: convolutions whose weight gradients run beside the backward pass,
batch norm fused with the residual sum and ReLU that follow it, and the paths of a method stacked where they are narrow.

Stacking: the paths see the same images through networks of the same shape, so they can run as one network of twice
the width with block-diagonal weights. That doubles the arithmetic, but a network like ResNet-20 is bound by kernel
launches and memory, not by arithmetic, and then the second path costs next to nothing.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dcil import SparseNet
from dcil.engine.cuda.flat import FlatParameters, roles_of
from dcil.engine.cuda.ops import Conv, Norm, Pool, SideStream
from dcil.engine.cuda.weights import PathWeights
from dcil.tracing import TracingError, trace

aten = torch.ops.aten


class Unfusable(Exception):
    """The network has a part that cannot be rewritten; it is trained as it is."""


@dataclass(frozen=True)
class TracedModel:
    """The model's graph in training, and whether evaluation has the same one."""

    modules: dict[str, nn.Module]  # the model's own layers by name
    graph: fx.Graph
    same_in_evaluation: bool


def traced(model: nn.Module, x: Tensor) -> TracedModel:
    """Trace ``model`` in both modes for inputs like ``x``."""
    try:
        evaluated, trained = (trace(model, x, training=mode).graph for mode in (False, True))
    except TracingError as error:
        raise Unfusable(str(error)) from None
    return TracedModel(dict(model.named_modules()), trained, str(evaluated) == str(trained))


class Head(nn.Module):
    """The classifier of each path, on its own part of the features; autograd computes the gradients of these weights.

    cells    for weight and bias, for each path: their memory and that of their gradient
    """

    def __init__(self, cells: Sequence[Sequence[tuple[Tensor, Tensor]]], dtype: torch.dtype) -> None:
        super().__init__()
        self.cells, self.dtype = cells, dtype
        self.leaves = [[value.detach().requires_grad_() for value, _ in kind] for kind in cells]

    def forward(self, x: Tensor) -> Tensor:
        cast = [[leaf.to(self.dtype) for leaf in kind] for kind in self.leaves]
        parts = x.to(self.dtype).chunk(len(cast[0]), 1)
        return torch.stack([F.linear(part, *own) for part, *own in zip(parts, *cast, strict=True)])

    def collect(self) -> None:
        """Copy the gradients to where the optimizer reads them."""
        for kind, cells in zip(self.leaves, self.cells, strict=True):
            for leaf, (_, gradient) in zip(kind, cells, strict=True):
                if leaf.grad is not None:
                    gradient.copy_(leaf.grad)
                    leaf.grad = None


@dataclass
class Program:
    """The rewritten network of one or more paths; ``run`` returns logits of shape (paths, images, classes)."""

    paths: tuple[str, ...]
    run: fx.GraphModule
    weights: PathWeights
    norms: list[Norm]
    head: Head
    same_in_evaluation: bool

    def __call__(self, x: Tensor, track: bool = True) -> dict[str, Tensor]:
        for norm in self.norms:
            norm.track = track
        return dict(zip(self.paths, self.run(x).unbind(0), strict=True))

    def zero_gradients(self) -> None:
        """Set all gradients to zero, for a step without any."""
        self.weights.gradients.zero_()
        for norm in self.norms:
            norm.dweight.zero_()
            norm.dbias.zero_()
        for kind in self.head.cells:
            for _, gradient in kind:
                gradient.zero_()


class Rewriter:
    """Turns the traced model into the Program of some of its paths."""

    def __init__(
        self,
        net: SparseNet,
        model: TracedModel,
        flat: FlatParameters,
        paths: Sequence[str],
        dtype: torch.dtype,
        side_stream: SideStream,
    ) -> None:
        self.net, self.model, self.flat, self.paths, self.dtype = net, model, flat, tuple(paths), dtype
        self.side_stream = side_stream
        self.weights = PathWeights(net, flat, paths, dtype)
        self.roles = roles_of(net)
        self.order = {name: i for i, name in enumerate(net.method.paths)}
        self.parts: dict[str, nn.Module] = {}
        self.classifier = ""

    def build(self) -> Program:
        graph = copy.deepcopy(self.model.graph)
        if any(node.op == "get_attr" for node in graph.nodes):
            raise Unfusable("a parameter or buffer is used outside of its module")
        for node in [n for n in graph.nodes if n.op == "call_module"]:
            if node in graph.nodes:  # a ReLU may be gone by now
                self.replace(graph, node)
        self.hand_out_twice(graph)
        root = nn.Module()
        for name, part in self.parts.items():
            root.add_module(name, part)
        graph.lint()
        self.weights.allocate()
        for part in self.parts.values():
            if isinstance(part, Conv):
                part.value, part.gradient = self.weights.at(part.name)
        head = self.head()
        root.add_module(self.classifier.replace(".", "_"), head)
        norms = [part for part in self.parts.values() if isinstance(part, Norm)]
        run, same = fx.GraphModule(root, graph), self.model.same_in_evaluation
        return Program(self.paths, run, self.weights, norms, head, same)

    def replace(self, graph: fx.Graph, node: fx.Node) -> None:
        name = str(node.target)
        module, target = self.model.modules[name], name.replace(".", "_")
        if target in self.parts:
            raise Unfusable(f"{name} is used twice")
        if isinstance(module, nn.Conv2d):
            self.parts[target] = self.conv(name, module, node)
        elif isinstance(module, nn.BatchNorm2d):
            fusable = self.fusable(node)
            self.parts[target] = self.norm(name, module, relu=bool(fusable))
            if fusable:
                node = fuse(graph, node, fusable)
        elif isinstance(module, nn.Linear):
            self.parts[target] = self.linear(name, module, node)
        elif isinstance(module, nn.MaxPool2d):
            self.parts[target] = Pool(module)
        elif any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
            raise Unfusable(f"{name} is a {type(module).__name__}")
        else:
            self.parts[target] = part = copy.copy(module)
            if hasattr(part, "inplace"):
                part.inplace = False  # type: ignore[assignment]  # nothing in the graph works in place
        node.target = target

    def conv(self, name: str, module: nn.Conv2d, node: fx.Node) -> Conv:
        if module.bias is not None or module.padding_mode != "zeros" or isinstance(module.padding, str):
            raise Unfusable(f"{name} has a bias or an unusual padding")
        if len(self.paths) > 1 and module.groups > 1:
            raise Unfusable(f"{name} has groups")
        if f"{name}.weight" not in self.net.masks and len(self.roles[f"{name}.weight"]) > 1:
            raise Unfusable(f"{name} is private to each path")
        source = node.args[0]
        first = isinstance(source, fx.Node) and source.op == "placeholder"
        self.weights.reserve(f"{name}.weight", first)
        return Conv(f"{name}.weight", module, self.side_stream, self.flat.device, 1 if first else len(self.paths))

    def norm(self, name: str, module: nn.BatchNorm2d, relu: bool) -> Norm:
        if not (module.affine and module.track_running_stats and module.momentum is not None):
            raise Unfusable(f"{name} is an unusual batch norm")
        at: dict[str, Tensor] = {}
        for key in ("weight", "bias"):
            own, starts = self.own(f"{name}.{key}"), self.flat.packed.starts
            at[key] = side_by_side(self.flat.weights, starts, own)
            at[f"d{key}"] = side_by_side(self.flat.gradient, starts, own)
        for key in ("running_mean", "running_var"):
            at[key] = side_by_side(self.flat.statistics.flat, self.flat.statistics.starts, self.own(f"{name}.{key}"))
        return Norm(module, at, relu)

    def linear(self, name: str, module: nn.Linear, node: fx.Node) -> nn.Module:
        if self.classifier or any(user.op != "output" for user in node.users):
            raise Unfusable(f"{name} is not the classifier")
        self.classifier = name
        if f"{name}.weight" in self.net.masks:
            self.weights.reserve(f"{name}.weight", first=False)
        return module  # replaced by a Head once its weights have memory

    def head(self) -> Head:
        """Build the classifier, once the weights have memory."""
        if not self.classifier:
            raise Unfusable("no classifier")
        flat, cells = self.flat, []
        for name in (f"{self.classifier}.{kind}" for kind in ("weight", "bias")):
            if name in self.net.masks:
                cells.append(list(zip(*self.weights.at(name), strict=True)))
            elif name in self.roles:
                cells.append([(flat.packed.at(t), flat.packed.like(flat.gradient, t)) for t in self.own(name)])
        return Head(cells, self.dtype)

    def own(self, name: str) -> list[Tensor]:
        """Return the tensors that this program's paths have in the role ``name``."""
        if len(self.roles[name]) != len(self.order):
            raise Unfusable(f"{name} is shared between paths")
        return [self.roles[name][self.order[path]] for path in self.paths]

    def fusable(self, norm: fx.Node) -> list[fx.Node]:
        """Return the nodes after a norm that it can compute itself: [ReLU], or [sum, ReLU], or none."""
        reader = only_reader(norm)
        if reader is None or self.is_relu(reader):
            return [reader] if reader is not None else []
        relu = only_reader(reader)
        if reader.target is not aten.add.Tensor or relu is None or not self.is_relu(relu):
            return []
        if len(reader.args) != 2 or not all(isinstance(a, fx.Node) for a in reader.args) or reader.kwargs:
            return []
        rival = reader.args[0]  # of two norms the first takes the sum
        free = rival is norm or not (isinstance(rival, fx.Node) and self.is_norm(rival) and only_reader(rival))
        return [reader, relu] if free else []

    def is_norm(self, node: fx.Node) -> bool:
        return node.op == "call_module" and isinstance(self.model.modules.get(str(node.target)), nn.BatchNorm2d)

    def is_relu(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(self.model.modules.get(str(node.target)), nn.ReLU)
        return node.target is aten.relu.default

    def hand_out_twice(self, graph: fx.Graph) -> None:
        """Give each of two readers of a norm an output of its own, so that their gradients arrive separately."""
        for node in list(graph.nodes):
            part = self.parts.get(str(node.target)) if node.op == "call_module" else None
            readers = list(node.users)
            if not isinstance(part, Norm) or len(readers) != 2:
                continue
            part.outputs = 2
            for i, reader in enumerate(readers):
                with graph.inserting_after(node):
                    handle = graph.call_function(operator.getitem, (node, i))
                reader.replace_input_with(node, handle)


def only_reader(node: fx.Node) -> fx.Node | None:
    readers = list(node.users)
    return readers[0] if len(readers) == 1 else None


def fuse(graph: fx.Graph, norm: fx.Node, others: Sequence[fx.Node]) -> fx.Node:
    """Put one node in place of the norm and the ``others`` after it."""
    residual = [a for a in others[0].args if a is not norm] if len(others) == 2 else []
    with graph.inserting_before(others[-1]):
        fused = graph.call_module(str(norm.target), (norm.args[0], *residual))
    others[-1].replace_all_uses_with(fused)
    for node in (*reversed(others), norm):
        graph.erase_node(node)
    return fused


def side_by_side(flat: Tensor, starts: dict[int, int], tensors: Sequence[Tensor]) -> Tensor:
    """Return the vectors of all paths as one view; they were packed next to each other."""
    places, size = [starts[id(t)] for t in tensors], tensors[0].numel()
    if any(b - a != size for a, b in itertools.pairwise(places)):
        raise Unfusable("a width that is not a multiple of 8")
    return flat[places[0] : places[0] + size * len(places)]
