"""What an operation of a traced network does with channels (dimension 1), as far as shrinking has to know."""

from __future__ import annotations

import operator
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd


class Kind(Enum):
    INPUT = "the network's input"
    CONV = "mixes channels by its weight: Conv, or Linear on (batch, features)"
    DEPTHWISE = "Conv with one filter per channel"
    NORM = "batch norm"
    CHANNELWISE = "each channel by itself, all by the same rule: activations, pooling, dropout"
    JOIN = "two tensors channel by channel: add, subtract, multiply"
    CAT = "channels behind one another"
    FLATTEN = "each channel becomes several features"
    SHAPE = "reads a size that shrinking does not change"
    OUTPUT = "the network's output"
    OTHER = "anything else: it gets every channel as it was"


CHANNELWISE_MODULES = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh),
    *(nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Identity, nn.Upsample),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
#: Functions and tensor methods by name; F.relu, torch.relu and x.relu() are all "relu".
CHANNELWISE_NAMES = {
    *("relu", "relu_", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "sigmoid", "tanh"),
    *("hardtanh", "hardswish", "hardsigmoid", "softplus", "softsign", "logsigmoid", "neg", "abs", "exp", "clamp"),
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "interpolate"),
    *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "contiguous", "clone", "mean", "amax"),
    *("boolean_dispatch",),  # how torch names F.max_pool2d and its like
}
#: Name -> the function that leaves its operands alone.
JOINS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("add", "iadd", "add_"), torch.add),
    **dict.fromkeys(("sub", "isub", "sub_"), torch.sub),
    **dict.fromkeys(("mul", "imul", "mul_"), torch.mul),
}


def name_of(node: fx.Node) -> str:
    """The bare name of a function or method."""
    target = node.target
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def where(node: fx.Node, modules: dict[str, nn.Module]) -> str:
    """The operation in words for a person: "features.3 (GroupNorm)"."""
    if node.op == "call_module":
        return f"{node.target} ({type(modules[str(node.target)]).__name__})"
    stack = node.meta.get("nn_module_stack") or {}
    owner = next(reversed(stack.values()))[0] if stack else ""
    return f"{name_of(node)}" + (f" in {owner}" if owner else "")


def changes_its_input(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """In place: relu_, +=, ReLU(inplace=True)."""
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    name = name_of(node)
    method = node.op == "call_method" and name.endswith("_") and not name.endswith("__")
    function = node.op == "call_function" and (name in ("iadd", "isub", "imul", "itruediv", "relu_"))
    return method or function or bool(node.kwargs.get("inplace", False))


def kind_of(node: fx.Node, modules: dict[str, nn.Module], values: dict[fx.Node, Any]) -> Kind:
    """``values`` holds an example of every node's value, by which broadcasts and reshapes are told apart."""
    if node.op in ("placeholder", "output"):
        return Kind.INPUT if node.op == "placeholder" else Kind.OUTPUT
    tensors = [values[n] for n in node.all_input_nodes if isinstance(values[n], Tensor)]
    if not all(t.ndim >= 2 for t in tensors) or node.op == "get_attr":
        return Kind.OTHER
    if node.op == "call_module":
        return _module_kind(modules[str(node.target)], tensors)
    return _function_kind(node, tensors, values)


def _module_kind(module: nn.Module, tensors: list[Tensor]) -> Kind:
    if isinstance(module, _ConvNd) and not isinstance(module, _ConvTransposeNd):
        if module.groups == 1:
            return Kind.CONV
        return Kind.DEPTHWISE if module.groups == module.in_channels == module.out_channels else Kind.OTHER
    if isinstance(module, nn.Linear):
        return Kind.CONV if tensors[0].ndim == 2 else Kind.OTHER
    if isinstance(module, _BatchNorm):
        return Kind.NORM if module.running_mean is not None else Kind.OTHER
    if isinstance(module, nn.Flatten):
        return Kind.FLATTEN if (module.start_dim, module.end_dim) == (1, -1) else Kind.OTHER
    if isinstance(module, CHANNELWISE_MODULES) and not getattr(module, "return_indices", False):
        return Kind.CHANNELWISE
    return Kind.OTHER


def _function_kind(node: fx.Node, tensors: list[Tensor], values: dict[fx.Node, Any]) -> Kind:
    name, value = name_of(node), values[node]
    if name in ("size", "getattr", "getitem") and not isinstance(value, Tensor):
        return _shape_kind(node, name)
    if not isinstance(value, Tensor) or value.ndim < 2 or not tensors:
        return Kind.OTHER
    if name == "cat":
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        return Kind.CAT if dim in (1, 1 - value.ndim) else Kind.OTHER
    if name in JOINS and len(tensors) + len(node.all_input_nodes) == 4:
        same = tensors[0].shape[1] == tensors[1].shape[1] and tensors[0].ndim == tensors[1].ndim
        return Kind.JOIN if same and not node.kwargs else Kind.OTHER
    first = tensors[0]
    if name in ("flatten", "view", "reshape") and value.ndim == 2 and len(value) == len(first):
        # A size that is written out would be wrong in the small network; only "the rest" stays right.
        written = node.args[1] if name == "flatten" and len(node.args) == 2 else node.args[-1]
        return Kind.FLATTEN if written == (1 if name == "flatten" else -1) and not node.kwargs else Kind.OTHER
    plain = name in JOINS or name in CHANNELWISE_NAMES or name in ("truediv", "div")
    return Kind.CHANNELWISE if plain and len(tensors) == 1 and _keeps_channels(node, name, first) else Kind.OTHER


def _keeps_channels(node: fx.Node, name: str, first: Tensor) -> bool:
    """The tensor comes first, and a mean goes over neither the batch nor the channels."""
    if name in JOINS:  # with a number
        return not node.kwargs
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if name in ("mean", "amax"):
        dims: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        dims = (dims,) if isinstance(dims, int) else dims
        return dims is not None and all(d % first.ndim >= 2 for d in dims)
    return not node.kwargs.get("return_indices", False)


def _shape_kind(node: fx.Node, name: str) -> Kind:
    """Sizes other than that of dimension 1."""
    if name == "size" and len(node.args) == 2:
        return Kind.SHAPE if node.args[1] not in (1, -1) else Kind.OTHER
    if name == "getitem":
        return Kind.SHAPE if node.args[1] in (0, 2, 3, 4) else Kind.OTHER
    picks = [user.args[1] for user in node.users if user.target is operator.getitem]
    plain = len(picks) == len(node.users) and all(pick in (0, 2, 3, 4) for pick in picks)
    return Kind.SHAPE if plain and (name == "size" or node.args[1] == "shape") else Kind.OTHER


def padded(module: nn.Module) -> bool:
    """Zeros around the image: a channel that is constant inside is then not constant for the filters."""
    if not isinstance(module, _ConvNd):
        return False
    padding: Any = module.padding
    size = padding != "valid" if isinstance(padding, str) else any(padding)
    return size and module.padding_mode == "zeros"


def weight_of(module: nn.Module) -> Tensor:
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.detach().to(torch.double)
