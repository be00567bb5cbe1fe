"""DCIL: dynamic collective intelligence learning (Kim, Yoo, Song, Yoo & Kwak, 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from dcil import views
from dcil.distillation import Distance, MutualDistillation, choose_distance, distill_both_ways
from dcil.granularity import NM, Filter, Granularity, Weight
from dcil.method import Method
from dcil.task import Objective, Task


@dataclass(frozen=True, kw_only=True)
class DCIL(Method):
    """Two networks share W: the pruned net sees M * W, the super net sees W with its own norms and classifier.

        W <- W - lr * { M * grad L(pruned net) + (1 - M) * grad L(super net) }                          (Eq. 3)
        L(pruned net) = CE(P) + kl * T^2 * KL(S || P; T)
        L(super net)  = CE(S) + kl * T^2 * KL(P || S; T)                                                (Eq. 4)

    One backward of the summed losses does it: each view lets the gradient through to its own weights only.

    kl            lambda of Eq. 4; 0 is the paper's "DCIL w/o KL"
    temperature   T of Eq. 4
    warmup        part of ``steps`` without the KL terms, when there is little to learn (the paper: 70 of 300 epochs)
    distill       "softmax" (Eq. 4), "sigmoid" (binary, multi-label), "mse" (regression) or a function
                  (student, teacher) -> scalar, which gets every position; None is "softmax" for cross-entropy,
                  other tasks must say
    class_dim     the dimension of the classes in the logits; None finds it by the classifier's outputs
    super_share   part of each batch, its first samples, that the super net computes and the KL terms take; each loss is
                  a mean over its own samples, so that the gradient keeps its expectation. The paper: 1

    Against the authors' code: exactly floor(s * n) weights go, not one more; the teacher's probabilities are not
    shifted by 1e-7, log-softmax being finite; the super net's classifier begins as a copy of the pruned net's.
    """

    kl: float = 1.0
    temperature: float = 2.0
    warmup: float = 70 / 300
    distill: str | Distance | None = None
    class_dim: int | None = None
    super_share: float = 1.0

    paths: ClassVar[Mapping[str, views.View]] = {"pruned": views.kept, "super": views.revived}
    granularities: ClassVar[tuple[type[Granularity], ...]] = (Weight, Filter, NM)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("kl", 0 <= self.kl <= 1000, ">= 0 and <= 1000", "0 disables the KL terms")
        self.require("temperature", 1e-3 <= self.temperature <= 1e3, "from 0.001 to 1000", "the paper: 2")
        self.require("warmup", 0 <= self.warmup <= 1, ">= 0 and <= 1", "the part of the steps without KL terms")
        known = self.distill is None or callable(self.distill)
        known = known or (isinstance(self.distill, str) and self.distill in ("softmax", "sigmoid", "mse"))
        self.require("super_share", 0 < self.super_share <= 1, "> 0 and <= 1", "1: the super net computes every sample")
        self.require("class_dim", self.class_dim != 0 or self.super_share == 1, "1 or -1 with a super_share")
        self.require("distill", known, "'softmax', 'sigmoid', 'mse' or a function (student, teacher) -> scalar")

    def kl_at(self, step: int) -> float:
        """The weight of the KL terms in the step that follows ``step`` others."""
        return self.kl if self.warmup < 1 and step >= round(self.warmup * self.steps) else 0.0

    def share(self, path: str) -> float:
        return self.super_share if path == "super" else 1.0

    def loss_key(self, step: int) -> MutualDistillation:
        return MutualDistillation(self.kl_at(step), self.temperature, self.distill or "softmax")

    def loss(self, outputs: Mapping[str, Any], target: Any, task: Task, step: int) -> Tensor:
        task = Objective.of(task).with_class_dim(self.class_dim)
        self.require("super_share", self.super_share == 1 or task.reduction != "sum", "1", "where the task sums")
        if not self.kl:
            return super().loss(outputs, target, task, step)
        # Checked from the first step on, not when the warm-up ends.
        weight, kind = self.kl_at(step), choose_distance(task, self.distill, type(self).__name__)
        p, s = (task.logits(outputs[path]) for path in ("pruned", "super"))
        dim = task.find_class_dim(p, target) if kind == "softmax" else None
        counted = task.counted(p, dim, target)
        if len(s) < len(p):
            p, counted = p[: len(s)], None if counted is None else counted[: len(s)]
        loss = super().loss(outputs, target, task, step)
        task.parts["kl_weight"] = weight
        if not weight:
            return loss
        kl = weight * distill_both_ways(p, s, kind, self.temperature, dim, counted, task.reduction)
        task.parts["loss/kl"] = kl.detach()
        return loss + kl
