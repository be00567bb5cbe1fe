"""Build networks by name: those of the paper, and transformers. Plain modules without any pruning code."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from dcil import errors
from dcil.models import cifar, imagenet
from dcil.models.gpt import GPT
from dcil.models.vit import SIZES, VisionTransformer
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
    **{f"vit-{size}-4": partial(VisionTransformer, *SIZES[size], 4) for size in ("ti", "s")},
    **{f"vit-{size}-16": partial(VisionTransformer, *SIZES[size], 16) for size in SIZES},
    "gpt-4-128": partial(GPT, 4, 128),
    "gpt-6-384": partial(GPT, 6, 384),
    "gpt-12-768": partial(GPT, 12, 768),
    "gpt-24-2048": partial(GPT, 24, 2048),
}
#: What `build` takes besides: a form of names, and what it means.
FORMS = {
    "wrn-D-W": "any depth and width",
    "vit-SIZE-P, vit-LAYERS-WIDTH-P": f"sizes {', '.join(SIZES)}, patches of any size",
    "gpt-LAYERS-WIDTH": "any layers and width; gpt-LAYERS-WIDTH-untied has a head of its own",
}


def names() -> list[str]:
    """Return the names in MODELS; `build` also takes those of the FORMS."""
    return list(MODELS)


def reads_tokens(name: str) -> bool:
    """Return whether the network reads tokens and predicts the next of each; others classify images."""
    return name.startswith("gpt-")


def check_reads(name: str, tokens: bool) -> None:
    """Refuse a network of images for tokens, and the other way round."""
    if reads_tokens(name) != tokens:
        wanted, got = ("tokens", "images") if reads_tokens(name) else ("images", "tokens")
        raise errors.UserError(f"{name} must be trained on {wanted}, got {got}: choose another --model or --dataset")


def build(name: str, classes: int = 10, channels: int = 3, size: int | None = None, dropout: float = 0.0) -> nn.Module:
    """Build the network `name`, initialised from torch's global generator.

    classes    classes of images, or tokens of the vocabulary
    channels   of the images
    size       side of the images, which a ViT has positions for, or the longest sequence of a GPT; None: the usual one
    dropout    part of the activations that transformers drop in training; other networks have none
    """
    wholes = {"classes": classes, "channels": channels, "size": 1 if size is None else size}
    for what, given in wholes.items():
        if not isinstance(given, int) or not 1 <= given <= 10**6:
            raise errors.UserError(
                f"{name}: {what} must be a whole number from 1 to 1,000,000, got {errors.shown(given)}"
            )
    network = _network(name)
    if reads_tokens(name):
        return network(classes, 256 if size is None else size, dropout)
    if name.startswith("vit-"):
        return network(classes, channels, size, dropout)
    if dropout:
        raise errors.UserError(f"{name} has no dropout: dropout must be 0, got {dropout:g} (vit-… and gpt-… have)")
    return network(classes=classes, channels=channels)


def build_for(name: str, classes: int, shape: Sequence[int], dropout: float = 0.0) -> nn.Module:
    """Build the network `name` for inputs of `shape`: (channels, height, width) of images, (length,) of tokens."""
    check_reads(name, tokens=len(shape) == 1)
    if len(shape) == 1:
        return build(name, classes, size=shape[0], dropout=dropout)
    if name.startswith("vit-") and shape[1] != shape[2]:
        raise errors.UserError(f"{name}: images must be square, got {shape[1]} x {shape[2]} pixels")
    return build(name, classes, shape[0], shape[1], dropout)


def example(shape: Sequence[int], classes: int, batch: int = 1) -> Tensor:
    """Return inputs of `shape` for `build_for`'s networks, the same each time: noise, or random tokens."""
    random = torch.Generator().manual_seed(0)
    if len(shape) == 1:
        return torch.randint(classes, (batch, *shape), generator=random)
    return torch.randn(batch, *shape, generator=random)


def _network(name: str) -> Callable[..., nn.Module]:
    """Return what builds the network of this name."""
    if name in MODELS:
        return MODELS[name]
    if wide := re.fullmatch(r"wrn-(\d{1,9})-(\d{1,9})", name):
        return partial(WideResNet, int(wide[1]), int(wide[2]))
    if gpt := re.fullmatch(r"gpt-(\d{1,9})-(\d{1,9})(-untied)?", name):
        return partial(GPT, int(gpt[1]), int(gpt[2]), tied=gpt[3] is None)
    if vit := re.fullmatch(rf"vit-({'|'.join(SIZES)})-(\d{{1,9}})", name):
        return partial(VisionTransformer, *SIZES[vit[1]], int(vit[2]))
    if vit := re.fullmatch(r"vit-(\d{1,9})-(\d{1,9})-(\d{1,9})", name):
        return partial(VisionTransformer, *(int(part) for part in vit.groups()))
    raise errors.unknown("model", name, MODELS)
