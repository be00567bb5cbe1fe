"""Return the full configs of named recipes: the paper's settings, and the authors' code's where the paper is silent.

Common to those of convolutional networks (Kim et al. 2022, implementation details and appendix; their code where the
paper is silent): SGD with Nesterov momentum 0.9, masks every 16 iterations, sparsity growing by epoch until the second
learning-rate drop, KL from the warm-up epoch on, weight decay on everything, five epochs in which the learning rate
grows from 0.1.

The paper has no transformers. Theirs name their sources; what concerns sparsity is as in the paper: masks every 16
iterations, three quarters of the training until the sparsity is reached, KL from 70/300 of it on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

from dcil import METHODS, Cubic, Global, Uniform
from dcil.errors import unknown
from dcil.train.config import Config
from dcil.train.method_settings import GRANULARITIES

#: The paper's protocol: what each method changes of its own ways, so that only the treatment of pruned weights differs.
PROTOCOL: dict[str, dict[str, Any]] = {
    "gmp": {"every": 16, "scope": Global(), "stem": True, "classifier": False},
    "sm": {"classifier": False},
    "dsr": {"stem": True, "shortcuts": True},
    "rigl": {"classifier": False},
    "sfp": {"gradual": True, "scope": Uniform(), "shortcuts": True},
    "fpgm": {"gradual": True, "scope": Uniform(), "shortcuts": True},
    "dns": {"gradual": True, "begin": 0.0, "until": 1.0, "gamma": 0.0, "every": 16},
    "oneshot": {"constant": False},
    "rewind": {"classifier": False},
    "l1filter": {"constant": False, "inner": False},
    "autoprune": {"every": 16},
    "acdc": {"classifier": False},
    "topkast": {"stem": True},
    "st3": {"begin": 0.0, "classifier": False},
    "feather": {"classifier": False},
    "granet": {"every": 0, "classifier": False},
    "srste": {"schedule": Cubic()},
}
#: Methods whose originals clip the norm of all gradients together (on images). Without it, pruned weights that train
#: straight through a threshold emptied whole layers of the digits recipe at 98 %.
CLIPPED = {"st3": 3.0, "feather": 3.0}
#: Methods whose sparsity grows with every step, not once per epoch.
SMOOTH = ("gmp", "st3", "feather", "granet")


def digits(method: str = "dcil", protocol: bool = True) -> Config:
    """Return the recipe of the embedded digits, which trains in about a minute."""
    return Config(
        method=method,
        granularity=natural(method),
        schedule=growth(method, protocol),
        clip_norm=CLIPPED.get(method, 0.0),
        settings=settings(method, protocol),
    )


def cifar_resnet(dataset: str, model: str, method: str = "dcil", protocol: bool = True) -> Config:
    """Return the recipe of CIFAR ResNets: 300 epochs, 0.2 divided by 10 at 150 and 225, KL from epoch 70."""
    return Config(
        dataset=dataset,
        model=model,
        method=method,
        granularity=natural(method),
        schedule=growth(method, protocol),
        epochs=300,
        target_epoch=225,
        batch=128,
        lr=0.2,
        milestones=(150, 225),
        lr_warmup_epochs=5,
        weight_decay=1e-4,
        clip_norm=CLIPPED.get(method, 0.0),
        settings=settings(method, protocol, warmup=70 / 300),
    )


def cifar_wrn(dataset: str, model: str, method: str = "dcil", protocol: bool = True) -> Config:
    """Return the recipe of wide ResNets on CIFAR: 200 epochs, 0.1 divided by 5 at 60, 120 and 160.

    The loop of the authors' code stops at 195 epochs.
    """
    return Config(
        dataset=dataset,
        model=model,
        method=method,
        granularity=natural(method),
        schedule=growth(method, protocol),
        epochs=200,
        target_epoch=120,
        batch=128,
        lr=0.1,
        milestones=(60, 120, 160),
        lr_decay=5.0,
        weight_decay=5e-4,
        clip_norm=CLIPPED.get(method, 0.0),
        settings=settings(method, protocol, warmup=70 / 200),
    )


def imagenet(
    model: str, batch: int, lr: float, lr_warmup_epochs: int, method: str = "dcil", protocol: bool = True
) -> Config:
    """Return the recipe of ImageNet: 90 epochs, divided by 10 at 30, 60 and 80, KL from epoch 10.

    The paper states no target epoch and no weight decay: the second drop and 1e-4 here, as for CIFAR. For ResNet-50
    it cites Goyal et al. 2017 for the batch of 1024, so the learning rate is scaled and warmed up as they do.
    """
    return Config(
        dataset="imagefolder",
        model=model,
        method=method,
        granularity=natural(method),
        schedule=growth(method, protocol),
        sparsity=0.9,
        epochs=90,
        target_epoch=60,
        batch=batch,
        lr=lr,
        milestones=(30, 60, 80),
        lr_warmup_epochs=lr_warmup_epochs,
        weight_decay=1e-4,
        clip_norm=CLIPPED.get(method, 0.0),
        settings=settings(method, protocol, warmup=10 / 90),
    )


def vit(dataset: str, method: str = "dcil", protocol: bool = True) -> Config:
    """Return the recipe of ViT on CIFAR: 200 epochs of AdamW, 1e-3 falling to 1e-5, label smoothing 0.1.

    Epochs, batch, rates, warm-up and smoothing of https://github.com/omihub777/ViT-CIFAR, which reports 91.0 % on
    CIFAR-10 for a network of this size with AutoAugment, which is not among the augmentations here. Decoupled decay of
    0.05 on matrices: Touvron et al., "Training data-efficient image transformers", ICML 2021.
    """
    return Config(
        dataset=dataset,
        model="vit-ti-4",
        method=method,
        granularity=natural(method),
        schedule=growth(method, protocol),
        sparsity=0.9,
        epochs=200,
        target_epoch=150,
        batch=128,
        optimizer="adamw",
        lr=1e-3,
        lr_schedule="cosine",
        lr_floor=1e-5,
        milestones=(),
        lr_warmup_epochs=5,
        lr_warmup_from=1e-5,
        weight_decay=0.05,
        decay_on="matrices",
        label_smoothing=0.1,
        settings=settings(method, protocol),
    )


def gpt(method: str = "dcil", protocol: bool = True) -> Config:
    """Return the recipe of a GPT of characters: 80 epochs of AdamW, 1e-3 falling to 1e-4, gradients clipped at 1.

    Of https://github.com/karpathy/nanoGPT, config/train_shakespeare_char.py: 5000 steps of 64 sequences of 256
    characters are 82 epochs of tiny Shakespeare, 100 steps of warm-up not two; it reports a validation loss of 1.4697
    (the lowest during the training). The sparsity grows with every step: epochs are as long as the text.
    """
    return Config(
        dataset="text",
        model="gpt-6-384",
        method=method,
        granularity=natural(method),
        schedule="step",
        sparsity=0.9,
        epochs=80,
        target_epoch=60,
        batch=64,
        length=256,
        optimizer="adamw",
        lr=1e-3,
        betas=(0.9, 0.99),
        lr_schedule="cosine",
        lr_floor=1e-4,
        milestones=(),
        lr_warmup_epochs=2,
        lr_warmup_from=1e-5,
        weight_decay=0.1,
        decay_on="matrices",
        clip_norm=1.0,
        dropout=0.2,
        settings=settings(method, protocol),
    )


def gpt_small(method: str = "dcil", protocol: bool = True) -> Config:
    """Return the recipe of a GPT that a CPU trains in minutes, on Python's own help texts.

    Sizes of nanoGPT's example for a CPU: sequences of 64 characters, no dropout.
    """
    return replace(
        gpt(method, protocol),
        dataset="pydoc",
        model="gpt-4-128",
        epochs=6,
        target_epoch=4,
        batch=16,
        length=64,
        lr_warmup_epochs=1,
        dropout=0.0,
    )


def settings(method: str, protocol: bool, **dcil: float) -> dict[str, Any]:
    """Return the protocol's settings of a method, or its own; DCIL's warm-up is the data set's in either case."""
    own = PROTOCOL.get(method, {}) if protocol else {}
    return {**own, **(dcil if method == "dcil" else {})}


def natural(method: str) -> str:
    """Return the granularity that a method prunes by default."""
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    default = next(field.default for field in fields(METHODS[method]) if field.name == "granularity")
    return next(name for name, granularity in GRANULARITIES.items() if granularity == default)


def growth(method: str, protocol: bool) -> str:
    """Return when the sparsity grows: once per epoch, as in the authors' code, in some originals with every step."""
    return "step" if method in SMOOTH and not protocol else "epoch"


def fast(dataset: str, model: str, target_epoch: int, method: str = "dcil", protocol: bool = True) -> Config:
    """Return the recipe of the paper's fast-convergence study: the target is reached earlier, and 25 epochs follow.

    The second learning-rate drop is at the target epoch; the first and the KL warm-up, which the paper does not give,
    keep their place relative to it.
    """
    config = cifar_resnet(dataset, model, method, protocol)
    epochs, warmup = target_epoch + 25, 70 * target_epoch / 225
    return replace(
        config,
        epochs=epochs,
        target_epoch=target_epoch,
        milestones=(target_epoch * 2 // 3, target_epoch),
        settings=settings(method, protocol, warmup=warmup / epochs),
    )


def scaled_epochs(config: Config, epochs: int) -> dict[str, Any]:
    """Return the fields of ``config`` that count epochs, scaled to a run of ``epochs`` epochs.

    Fine-tuning is rounded up, so that a run that has one keeps one.
    """
    factor = epochs / config.epochs
    return {
        "epochs": epochs,
        "target_epoch": max(1, round(config.target_epoch * factor)),
        "milestones": tuple(max(1, round(milestone * factor)) for milestone in config.milestones),
        "lr_warmup_epochs": round(config.lr_warmup_epochs * factor),
        "finetune_epochs": math.ceil(config.finetune_epochs * factor),
    }


CIFAR_RESNETS = ("resnet20", "resnet32", "resnet44", "resnet56", "resnet110", "resnet56-bottleneck")
CIFAR_WRNS = ("wrn-28-2", "wrn-28-4", "wrn-28-8", "wrn-28-10")

RECIPES: dict[str, Callable[..., Config]] = {
    "digits": digits,
    **{f"{d}-{m}": partial(cifar_resnet, d, m) for d in ("cifar10", "cifar100") for m in CIFAR_RESNETS},
    **{f"{d}-{m}": partial(cifar_wrn, d, m) for d in ("cifar10", "cifar100") for m in CIFAR_WRNS},
    **{
        f"cifar10-{m}-target{t}": partial(fast, "cifar10", m, t)
        for m in ("resnet20", "resnet32")
        for t in (100, 125, 150, 175, 200, 225)
    },
    "imagenet-resnet18": partial(imagenet, "resnet18", 128, 0.1, 0),
    "imagenet-resnet50": partial(imagenet, "resnet50", 1024, 0.4, 5),
    **{f"vit-{dataset}": partial(vit, dataset) for dataset in ("cifar10", "cifar100")},
    "gpt-text": gpt,
    "gpt-pydoc": gpt_small,
}
