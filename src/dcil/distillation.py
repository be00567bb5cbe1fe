"""Distillation: the terms by which two paths learn from each other's output."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dcil.batched_views import is_plain
from dcil.errors import UserError
from dcil.mutual_kl import mutual_kl
from dcil.task import Objective, called, kind

#: (student, teacher) -> scalar. The teacher is a constant already.
Distance = Callable[[Tensor, Tensor], Tensor]


def distill(
    student: Tensor,
    teacher: Tensor,
    temperature: float,
    dim: int = 1,
    counted: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """T^2 * KL(teacher || student; T) of softmax over ``dim``; the teacher is a constant (Hinton et al. 2015).

    Reduced over the positions that are ``counted`` (all, if None), as the task's loss is: their mean, or their sum.
    """
    student, teacher = exact(student), exact(teacher.detach())
    log_p = F.log_softmax(teacher / temperature, dim=dim)
    log_q = F.log_softmax(student / temperature, dim=dim)
    terms = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim)
    return temperature**2 * reduce(terms, counted, reduction)


def distill_sigmoid(
    student: Tensor, teacher: Tensor, temperature: float, counted: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """T^2 * KL(teacher || student; T) of one Bernoulli variable per logit: for binary and multi-label tasks."""
    student, teacher = exact(student) / temperature, exact(teacher.detach()) / temperature
    p = teacher.sigmoid()
    # p log(p / q) + (1 - p) log((1 - p) / (1 - q)), of which no logarithm can become infinite
    terms = p * (F.logsigmoid(teacher) - F.logsigmoid(student))
    terms = terms + (1 - p) * (F.logsigmoid(-teacher) - F.logsigmoid(-student))
    return temperature**2 * reduce(terms, counted, reduction)


def distill_mse(student: Tensor, teacher: Tensor, counted: Tensor | None = None, reduction: str = "mean") -> Tensor:
    """(student - teacher)^2: for regression."""
    return reduce((exact(student) - exact(teacher.detach())).square(), counted, reduction)


def exact(logits: Tensor) -> Tensor:
    """In float at least: two similar distributions differ by less than half precision resolves."""
    return logits if logits.dtype == torch.double else logits.float()


def distill_mutually(
    p: Tensor, s: Tensor, temperature: float, dim: int, counted: Tensor | None, reduction: str
) -> Tensor:
    """``distill(p, s, …) + distill(s, p, …)``, in fewer operations and less memory."""
    if not is_plain() or p.dtype != s.dtype or p.shape != s.shape:
        return distill(p, s, temperature, dim, counted, reduction) + distill(s, p, temperature, dim, counted, reduction)
    positions = [size for i, size in enumerate(p.shape) if i != dim % p.dim()]
    if counted is not None:
        counted = counted.reshape(*counted.shape, *[1] * (len(positions) - counted.dim())).expand(positions)
    total = mutual_kl(p, s, temperature, dim, counted)
    if reduction == "batchmean":
        return total / max(1, positions[0])
    if reduction != "mean":
        return total
    return total / (math.prod(positions) if counted is None else counted.sum().clamp_min(1))


def reduce(terms: Tensor, counted: Tensor | None, reduction: str) -> Tensor:
    """The mean or the sum of the counted terms, without waiting for the device; "batchmean" divides by the batch."""
    if reduction == "batchmean":
        return reduce(terms, counted, "sum") / max(1, len(terms))
    if counted is None:
        return terms.mean() if reduction == "mean" else terms.sum()
    counted = counted.reshape(*counted.shape, *[1] * (terms.dim() - counted.dim())).expand_as(terms)
    total = torch.where(counted, terms, 0).sum()  # not a product: an ignored position may hold inf or NaN
    return total / counted.sum().clamp_min(1) if reduction == "mean" else total


@dataclass(frozen=True)
class MutualDistillation:
    """weight * { D(teacher = S, student = P) + D(teacher = P, student = S) }: each path is the other's teacher.

        softmax    D = T^2 * KL(teacher || student; T) over the classes                (Kim et al. 2022, Eq. 4)
        sigmoid    the same of one Bernoulli variable per logit
        mse        (student - teacher)^2

    As a method's ``loss_key`` it says: the loss is the task's, summed over the two paths, plus this.
    """

    weight: float
    temperature: float
    kind: str | Distance = "softmax"


def choose_distance(task: Objective, asked: str | Distance | None, method: str) -> str | Distance:
    """What the KL terms compare: as asked for, or as the task says; softmax only if it is a cross-entropy."""
    if found := asked or task.argument("distill", None) or ("softmax" if task.is_cross_entropy else None):
        return found
    name = task.function or getattr(task.task, "__name__", type(task.task).__name__)
    raise UserError(
        f"{method}: distill must say what the KL terms compare when the task is {name}, got None ('softmax' for "
        "classes, 'sigmoid' for binary and multi-label, 'mse' for regression; kl=0 trains without them)"
    )


def distill_both_ways(
    p: Tensor,
    s: Tensor,
    kind: str | Distance = "softmax",
    temperature: float = 2.0,
    dim: int | None = 1,
    counted: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """D(teacher = S, student = P) + D(teacher = P, student = S) of a ``MutualDistillation``, without its weight."""
    if kind == "softmax":
        assert dim is not None
        return distill_mutually(p, s, temperature, dim, counted, reduction)

    def distance(student: Tensor, teacher: Tensor) -> Tensor:
        if kind == "sigmoid":
            return distill_sigmoid(student, teacher, temperature, counted, reduction)
        if kind == "mse":
            return distill_mse(student, teacher, counted, reduction)
        assert callable(kind)
        return scalar(called(kind, "distill", "(student, teacher) -> scalar", student, teacher.detach()))

    return distance(p, s) + distance(s, p)


def scalar(value: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.dim():
        raise UserError(f"distill must return a scalar tensor, got {kind(value)}")
    return value
