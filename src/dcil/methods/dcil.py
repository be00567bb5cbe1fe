"""DCIL: dynamic collective intelligence learning (Kim, Yoo, Song, Yoo & Kwak, 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from dcil import views
from dcil.distillation import MutualDistillation
from dcil.errors import UserError
from dcil.granularity import NM, Filter, Granularity, Weight
from dcil.method import Method, Task


@dataclass(frozen=True, kw_only=True)
class DCIL(Method):
    """Two networks share W: the pruned net sees M * W, the super net sees W with its own norms and classifier.

        W <- W - lr * { M * grad L(pruned net) + (1 - M) * grad L(super net) }                          (Eq. 3)
        L(pruned net) = CE(P) + kl * T^2 * KL(S || P; T)
        L(super net)  = CE(S) + kl * T^2 * KL(P || S; T)                                                (Eq. 4)

    One backward of the summed losses does it: each view lets the gradient through to its own weights only.

    kl            lambda of Eq. 4; 0 is the paper's "DCIL w/o KL"
    temperature   T of Eq. 4
    warmup        part of ``steps`` without the KL terms, while there is nothing to learn from the other net
                  (the paper: 70 of 300 epochs)

    Against the authors' code: exactly floor(s * n) weights go instead of one more, and the teacher's
    probabilities are not shifted by 1e-7, since log-softmax is finite anyway.
    """

    kl: float = 1.0
    temperature: float = 2.0
    warmup: float = 70 / 300

    paths: ClassVar[Mapping[str, views.View]] = {"pruned": views.kept, "super": views.revived}
    granularities: ClassVar[tuple[type[Granularity], ...]] = (Weight, Filter, NM)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("kl", self.kl >= 0, ">= 0", "0 disables the KL terms")
        self.require("temperature", self.temperature > 0, "> 0", "the paper: 2")
        self.require("warmup", 0 <= self.warmup <= 1, ">= 0 and <= 1", "the part of the steps without KL terms")

    def kl_at(self, step: int) -> float:
        """The weight of the KL terms in the step that follows ``step`` others."""
        return self.kl if self.warmup < 1 and step >= round(self.warmup * self.steps) else 0.0

    def loss_key(self, step: int) -> MutualDistillation:
        return MutualDistillation(self.kl_at(step), self.temperature)

    def loss(self, outputs: Mapping[str, Any], target: Any, task: Task, step: int) -> Tensor:
        loss = super().loss(outputs, target, task, step)
        # Checked from the first step on, not when the warm-up ends.
        if self.kl and not all(isinstance(out, Tensor) and out.dim() >= 2 for out in outputs.values()):
            kinds = ", ".join(type(out).__name__ for out in outputs.values())
            raise UserError(f"DCIL: outputs must be logits of shape (batch, classes, …) for the KL terms, got {kinds} "
                            "(kl=0 trains without them)")  # fmt: skip
        distillation = self.loss_key(step)
        return loss + distillation(outputs["pruned"], outputs["super"]) if distillation.weight else loss
