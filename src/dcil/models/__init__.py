"""Build the networks of the paper by name: plain modules without any pruning code."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from torch import nn

from dcil import errors
from dcil.models import cifar, imagenet
from dcil.models.wide import WideResNet

MODELS: dict[str, Callable[..., nn.Module]] = {
    "resnet8-digits": partial(cifar.resnet, 8, width=12),
    "resnet20": partial(cifar.resnet, 20),
    "resnet32": partial(cifar.resnet, 32),
    "resnet44": partial(cifar.resnet, 44),
    "resnet56": partial(cifar.resnet, 56),
    "resnet110": partial(cifar.resnet, 110),
    "resnet56-bottleneck": cifar.resnet56_bottleneck,
    "wrn-28-2": partial(WideResNet, 28, 2),
    "wrn-28-4": partial(WideResNet, 28, 4),
    "wrn-28-8": partial(WideResNet, 28, 8),
    "wrn-28-10": partial(WideResNet, 28, 10),
    "resnet18": imagenet.resnet18,
    "resnet34": imagenet.resnet34,
    "resnet50": imagenet.resnet50,
}


def names() -> list[str]:
    """Return the names in MODELS; `build` also takes any other wrn-DEPTH-WIDTH."""
    return list(MODELS)


def build(name: str, classes: int = 10, channels: int = 3) -> nn.Module:
    """Build the network `name`, initialised from torch's global generator."""
    for what, given in (("classes", classes), ("channels", channels)):
        if not isinstance(given, int) or not 1 <= given <= 10**6:
            raise errors.UserError(
                f"{name}: {what} must be a whole number from 1 to 1,000,000, got {errors.shown(given)}"
            )
    if name in MODELS:
        return MODELS[name](classes=classes, channels=channels)
    if wide := re.fullmatch(r"wrn-(\d{1,9})-(\d{1,9})", name):
        return WideResNet(int(wide[1]), int(wide[2]), classes, channels)
    raise errors.unknown("model", name, MODELS)
