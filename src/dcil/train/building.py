"""Build the network and the optimizer of a config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dcil import SparseNet, models
from dcil.data import ImageFolder, TrainingData
from dcil.engine import StepSettings
from dcil.naming import tied_names
from dcil.partition import divide, is_norm
from dcil.train.config import PRIVATE, Config


def describe_data(dataset: TrainingData) -> dict[str, Any]:
    """Return what config.json says about the data: the classes, the shape of an input and, of a text, which it is."""
    found: dict[str, Any] = {"classes": dataset.classes, "shape": list(dataset.shape)}
    text = getattr(dataset, "record", None)
    return found if text is None else found | {"text": text}


def augmented(config: Config, dataset: TrainingData) -> TrainingData:
    """Return the data set with the augmentation of a config."""
    return replace(dataset, color_jitter=config.color_jitter) if isinstance(dataset, ImageFolder) else dataset


def build_model(config: Config, classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Build the network of a config for its data, initialised from torch's global generator."""
    return models.build_for(config.model, classes, shape, config.dropout)


def build_empty(config: Config, classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Build the same network on the CPU without initial weights, which take time: a state dict is to replace them."""
    with torch.device("meta"):
        model = build_model(config, classes, shape)
    tied = tied_names(model)
    # What to_empty does, without its slow import of sympy. Like that it makes two tensors of a tied one.
    model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype))  # type: ignore[no-untyped-call]
    for name, first in tied.items():
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, model.get_parameter(first))
    return model


def build_net(config: Config, model: nn.Module, epoch_steps: int) -> SparseNet:
    """Wrap the network with the method of a config.

    Which weights are prunable does not depend on what is private: a head that the paths share stays dense.
    """
    method = config.build_method(epoch_steps)
    if len(method.paths) == 1 or config.private == PRIVATE[0]:
        return SparseNet(model, method)
    usual, wanted = divide(model, method), config.private.split(",")
    private = [n for n in usual.private if ("norms" if is_norm(model.get_submodule(n)) else "head") in wanted]
    return SparseNet(model, method, prunable=list(usual.prunable), private=private)


def build_optimizer(config: Config, net: SparseNet) -> Optimizer:
    """Build the optimizer of a config; AdamW (Loshchilov & Hutter, ICLR 2019) is torch's fused one where it can be."""
    groups = parameter_groups(config, net)
    if config.optimizer == "sgd":
        return torch.optim.SGD(
            groups,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.momentum > 0,
            weight_decay=config.weight_decay,
        )
    fused = net.first_mask.device.type in ("cpu", "cuda")
    betas = config.betas[0], config.betas[1]
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=betas, eps=config.eps, weight_decay=config.weight_decay, fused=fused
    )


def parameter_groups(config: Config, net: SparseNet) -> Any:
    """Return all parameters as one group, or two: those that are decayed, and those that are not.

    The latter are vectors (biases, norm layers) and what the network names in ``no_weight_decay``, on every path.
    """
    if config.decay_on == "all":
        return net.parameters()
    named: set[str] = net.no_weight_decay() if hasattr(net, "no_weight_decay") else set()
    found: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in net.named_parameters():
        found[parameter.dim() >= 2 and name not in named].append(parameter)
    groups: list[dict[str, Any]] = [{"params": found[True]}, {"params": found[False], "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def step_settings(config: Config) -> StepSettings:
    """Return what a step computes besides the method."""
    return StepSettings(config.label_smoothing, config.clip_norm)
