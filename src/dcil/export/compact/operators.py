"""Classify the operations of a traced network by what they do with channels (dimension 1)."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from dcil.tracing import place_of

aten = torch.ops.aten


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
#: ATen operators by name.
CHANNELWISE_OPERATORS = {
    *("relu", "leaky_relu", "elu", "celu", "gelu", "silu", "mish", "sigmoid", "tanh", "hardtanh", "hardswish"),
    *("hardsigmoid", "softplus", "neg", "abs", "exp", "clamp", "clamp_min", "clamp_max", "mean", "amax", "detach"),
    *("add", "sub", "rsub", "mul", "div"),  # with a number
    *("max_pool2d", "max_pool3d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"),
    *(f"upsample_{how}" for how in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d")),
}
JOINS = ("add", "sub", "mul")
#: Operators with several results -> one that has the first of them alone.
FIRST_RESULT_ALONE = {
    aten.max_pool2d_with_indices.default: aten.max_pool2d.default,
    aten.max_pool3d_with_indices.default: aten.max_pool3d.default,
}


def name_of(node: fx.Node) -> str:
    """Return an operator's name, with its namespace unless it is ATen's."""
    schema = getattr(node.target, "_schema", None)
    return str(node.target) if schema is None else str(schema.name).removeprefix("aten::")


def where(node: fx.Node, modules: dict[str, nn.Module]) -> str:
    """Name the operation for a person: "features.3 (GroupNorm)"."""
    if node.op == "call_module":
        return f"{node.target} ({type(modules[str(node.target)]).__name__})"
    return f"{name_of(node)} in {place_of(node)}"


def kind_of(node: fx.Node, modules: dict[str, nn.Module], values: dict[fx.Node, Any]) -> Kind:
    """Classify ``node``; ``values`` has an example of every node's value, which tells broadcasts and reshapes apart."""
    if node.op in ("placeholder", "output"):
        return Kind.INPUT if node.op == "placeholder" else Kind.OUTPUT
    tensors = [values[n] for n in node.all_input_nodes if isinstance(values[n], Tensor)]
    if not all(t.ndim >= 2 for t in tensors) or node.op == "get_attr":
        return Kind.OTHER
    if node.op == "call_module":
        return _module_kind(modules[str(node.target)], tensors)
    return _operator_kind(node, tensors, values[node])


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


def _operator_kind(node: fx.Node, tensors: list[Tensor], value: Any) -> Kind:
    if node.target is aten.sym_size.int:
        return Kind.SHAPE  # of the batch
    if not isinstance(value, Tensor) or value.ndim < 2 or not tensors:
        return Kind.OTHER
    name, first = name_of(node), tensors[0]
    if name == "cat":
        dim = node.args[1] if len(node.args) > 1 else 0
        return Kind.CAT if dim in (1, 1 - value.ndim) else Kind.OTHER
    if name in JOINS and len(tensors) + len(node.all_input_nodes) == 4:
        same = first.shape[1] == tensors[1].shape[1] and first.ndim == tensors[1].ndim
        return Kind.JOIN if same and not node.kwargs else Kind.OTHER
    if name == "flatten":
        return Kind.FLATTEN
    plain = name in CHANNELWISE_OPERATORS and len(tensors) == 1 and not node.kwargs
    return Kind.CHANNELWISE if plain and _keeps_channels(node, name, first) else Kind.OTHER


def _keeps_channels(node: fx.Node, name: str, first: Tensor) -> bool:
    """Return whether a reduction leaves out the batch and the channels."""
    dims: Any = node.args[1] if len(node.args) > 1 else ()
    return name not in ("mean", "amax") or (bool(dims) and all(d % first.ndim >= 2 for d in dims))


def padded(module: nn.Module) -> bool:
    """Return whether zeros are padded around the image, which make a constant channel vary at the edges."""
    if not isinstance(module, _ConvNd):
        return False
    padding: Any = module.padding
    size = padding != "valid" if isinstance(padding, str) else any(padding)
    return size and module.padding_mode == "zeros"


def weight_of(module: nn.Module) -> Tensor:
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.detach().to(torch.double)
