"""A convolutional network rewritten for the GPU: convolutions whose weight gradients run beside the backward pass,
batch norm fused with the residual sum and ReLU behind it, and the paths of a method stacked where they are narrow.

Stacking: the paths see the same images through networks of the same shape, so they can run as one network of twice
the width with block-diagonal weights. That doubles the arithmetic, but a network like ResNet-20 waits for launches and
memory, not for arithmetic, and then the second path costs next to nothing.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dcil import SparseNet
from dcil.engine.cuda.flat import Flat, roles_of
from dcil.engine.cuda.ops import Conv, Norm, Pool, SideStream
from dcil.engine.cuda.weights import Weights

ADDITIONS = (operator.add, operator.iadd, torch.add)


class Unfusable(Exception):
    """The network has something that this file does not know; the plain way serves it."""


class OwnThread(fx.Tracer):
    """Traces what this thread calls. While a tracer is at work, torch sends it the modules of every thread: those of
    other runs are theirs to call."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    @property
    def called(self) -> bool:
        return threading.get_ident() == self.thread

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return super().call_module(m, forward, args, kwargs) if self.called else forward(*args, **kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return super().getattr(attr, attr_val, parameter_proxy_cache) if self.called else attr_val


class Head(nn.Module):
    """The classifier of each path, on its own part of the features; these few weights leave it to autograd.

    cells: for weight and bias, for each path, their memory and that of their gradient.
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
        """Hand the gradients to the optimizer."""
        for kind, cells in zip(self.leaves, self.cells, strict=True):
            for leaf, (_, gradient) in zip(kind, cells, strict=True):
                if leaf.grad is not None:
                    gradient.copy_(leaf.grad)
                    leaf.grad = None


@dataclass
class Program:
    """The rewritten network of one or more paths; gives logits of shape (paths, images, classes)."""

    paths: tuple[str, ...]
    run: fx.GraphModule
    weights: Weights
    norms: list[Norm]
    head: Head
    same_in_evaluation: bool

    def __call__(self, x: Tensor, track: bool = True) -> dict[str, Tensor]:
        for norm in self.norms:
            norm.track = track
        return dict(zip(self.paths, self.run(x).unbind(0), strict=True))

    def forget(self) -> None:
        """The gradients of the step before: this one has none."""
        self.weights.gradients.zero_()
        for norm in self.norms:
            norm.dweight.zero_()
            norm.dbias.zero_()
        for kind in self.head.cells:
            for _, gradient in kind:
                gradient.zero_()


class Rewriter:
    """Turns the traced graph of the model into a Program."""

    def __init__(self, net: SparseNet, flat: Flat, paths: Sequence[str], dtype: torch.dtype, lane: SideStream) -> None:
        self.net, self.flat, self.paths, self.dtype, self.lane = net, flat, tuple(paths), dtype, lane
        self.weights = Weights(net, flat, paths, dtype)
        self.roles = roles_of(net)
        self.order = {name: i for i, name in enumerate(net.method.paths)}
        self.parts: dict[str, nn.Module] = {}
        self.classifier = ""

    def build(self) -> Program:
        graph, same_in_evaluation = traced(self.net.model)
        if any(node.op == "get_attr" for node in graph.nodes):
            raise Unfusable("uses a parameter outside of its module")
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
        return Program(self.paths, fx.GraphModule(root, graph), self.weights, norms, head, same_in_evaluation)

    def replace(self, graph: fx.Graph, node: fx.Node) -> None:
        name = str(node.target)
        module, target = self.net.model.get_submodule(name), name.replace(".", "_")
        if target in self.parts:
            raise Unfusable(f"{name} is used twice")
        if isinstance(module, nn.Conv2d):
            self.parts[target] = self.conv(name, module, node)
        elif isinstance(module, nn.BatchNorm2d):
            behind = self.behind(node)
            self.parts[target] = self.norm(name, module, relu=bool(behind))
            if behind:
                node = take_over(graph, node, behind)
        elif isinstance(module, nn.Linear):
            self.parts[target] = self.linear(name, module, node)
        elif isinstance(module, nn.MaxPool2d):
            self.parts[target] = Pool(module)
        elif any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
            raise Unfusable(f"{name} is a {type(module).__name__}")
        else:
            self.parts[target] = module
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
        self.weights.place(f"{name}.weight", first)
        return Conv(f"{name}.weight", module, self.lane, self.flat.device, 1 if first else len(self.paths))

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
            self.weights.place(f"{name}.weight", first=False)
        return module  # until there is memory for its weights

    def head(self) -> Head:
        """The classifier, once the weights have memory."""
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
        """The tensors that this program's paths have in the role ``name``."""
        if len(self.roles[name]) != len(self.order):
            raise Unfusable(f"{name} is shared between paths")
        return [self.roles[name][self.order[path]] for path in self.paths]

    def behind(self, norm: fx.Node) -> list[fx.Node]:
        """The nodes that the norm can take over: [ReLU], or [sum, ReLU], or none."""
        reader = only_reader(norm)
        if reader is None or self.is_relu(reader):
            return [reader] if reader is not None else []
        relu = only_reader(reader)
        if reader.target not in ADDITIONS or relu is None or not self.is_relu(relu):
            return []
        if len(reader.args) != 2 or not all(isinstance(a, fx.Node) for a in reader.args) or reader.kwargs:
            return []
        rival = reader.args[0]  # of two norms the first takes the sum
        free = rival is norm or not (isinstance(rival, fx.Node) and self.is_norm(rival) and only_reader(rival))
        return [reader, relu] if free else []

    def is_norm(self, node: fx.Node) -> bool:
        names = (n for n, m in self.net.model.named_modules() if isinstance(m, nn.BatchNorm2d))
        return node.op == "call_module" and node.target in names

    def is_relu(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(dict(self.net.model.named_modules()).get(str(node.target)), nn.ReLU)
        return node.target in (torch.relu, F.relu, "relu")

    def hand_out_twice(self, graph: fx.Graph) -> None:
        """Give each of two readers of a norm its own handle, so that their gradients arrive apart."""
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


def traced(model: nn.Module) -> tuple[fx.Graph, bool]:
    """The graph of the model in training, and whether it has the same one in evaluation."""
    modes = {module: module.training for module in model.modules()}
    try:
        evaluated, trained = (OwnThread().trace(model.train(mode)) for mode in (False, True))
    except Exception as error:  # tracing runs the user's code on stand-ins: anything may come
        raise Unfusable(f"cannot be traced: {error}") from None
    finally:
        for module, mode in modes.items():
            module.training = mode
    return trained, str(evaluated) == str(trained)


def only_reader(node: fx.Node) -> fx.Node | None:
    readers = list(node.users)
    return readers[0] if len(readers) == 1 else None


def take_over(graph: fx.Graph, norm: fx.Node, behind: Sequence[fx.Node]) -> fx.Node:
    """One node in place of the norm and those behind it."""
    residual = [a for a in behind[0].args if a is not norm] if len(behind) == 2 else []
    with graph.inserting_before(behind[-1]):
        fused = graph.call_module(str(norm.target), (norm.args[0], *residual))
    behind[-1].replace_all_uses_with(fused)
    for node in (*reversed(behind), norm):
        graph.erase_node(node)
    return fused


def side_by_side(flat: Tensor, starts: dict[int, int], tensors: Sequence[Tensor]) -> Tensor:
    """The vectors of all paths as one; they were packed that way."""
    places, size = [starts[id(t)] for t in tensors], tensors[0].numel()
    if any(b - a != size for a, b in itertools.pairwise(places)):
        raise Unfusable("a width that is not a multiple of 8")
    return flat[places[0] : places[0] + size * len(places)]
