"""Recipes: functions that return a full config. The paper's settings, and the authors' where the paper is silent.

Common to all (Kim et al. 2022, implementation details and appendix; their code where the paper is silent): SGD with
Nesterov momentum 0.9, masks every 16 iterations, sparsity growing by epoch until the second learning-rate drop,
KL from the warm-up epoch on, weight decay on everything, five epochs in which the learning rate grows from 0.1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dcil.train.config import Config


def digits(method: str = "dcil") -> Config:
    """The embedded data in a minute: for trying out and for the demo."""
    return Config(method=method)


def cifar_resnet(dataset: str, model: str, method: str = "dcil", target_epoch: int = 225, tail: int = 75) -> Config:
    """ResNets on CIFAR: 300 epochs, 0.2 divided by 10 at 150 and 225, decay 1e-4, KL from epoch 70."""
    epochs = target_epoch + tail
    return Config(
        dataset=dataset,
        model=model,
        method=method,
        epochs=epochs,
        target_epoch=target_epoch,
        batch=128,
        lr=0.2,
        milestones=(target_epoch * 2 // 3, target_epoch),
        lr_warmup_epochs=5,
        weight_decay=1e-4,
        settings=kl_from(method, 70, epochs),
    )


def cifar_wrn(dataset: str, model: str, method: str = "dcil") -> Config:
    """Wide ResNets on CIFAR: 200 epochs (the authors' loop stops at 195), 0.1 divided by 5 at 60, 120 and 160."""
    return Config(
        dataset=dataset,
        model=model,
        method=method,
        epochs=200,
        target_epoch=120,
        batch=128,
        lr=0.1,
        milestones=(60, 120, 160),
        lr_decay=5.0,
        weight_decay=5e-4,
        settings=kl_from(method, 70, 200),
    )


def imagenet(model: str, batch: int, lr: float, lr_warmup_epochs: int, method: str = "dcil") -> Config:
    """ImageNet: 90 epochs, divided by 10 at 30, 60 and 80, KL from epoch 10.

    The paper states no target epoch and no weight decay: the second drop and 1e-4 here, as for CIFAR. For ResNet-50
    it cites Goyal et al. 2017 for the batch of 1024, so the learning rate is scaled and warmed up as they do.
    """
    return Config(
        dataset="imagefolder",
        model=model,
        method=method,
        sparsity=0.9,
        epochs=90,
        target_epoch=60,
        batch=batch,
        lr=lr,
        milestones=(30, 60, 80),
        lr_warmup_epochs=lr_warmup_epochs,
        weight_decay=1e-4,
        settings=kl_from(method, 10, 90),
    )


def kl_from(method: str, epoch: int, epochs: int) -> dict[str, float]:
    """DCIL's warm-up, given in epochs as the paper does."""
    return {"warmup": epoch / epochs} if method == "dcil" else {}


CIFAR_RESNETS = ("resnet20", "resnet32", "resnet44", "resnet56", "resnet110", "resnet56-bottleneck")
CIFAR_WRNS = ("wrn-28-2", "wrn-28-4", "wrn-28-8", "wrn-28-10")

RECIPES: dict[str, Callable[..., Config]] = {
    "digits": digits,
    **{f"{d}-{m}": partial(cifar_resnet, d, m) for d in ("cifar10", "cifar100") for m in CIFAR_RESNETS},
    **{f"{d}-{m}": partial(cifar_wrn, d, m) for d in ("cifar10", "cifar100") for m in CIFAR_WRNS},
    "imagenet-resnet18": partial(imagenet, "resnet18", 128, 0.1, 0),
    "imagenet-resnet50": partial(imagenet, "resnet50", 1024, 0.4, 5),
}
