"""Distillation: the KL terms by which two paths learn from each other's output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def distill(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 * KL(teacher || student; T), the mean over the batch; the teacher is a constant (Hinton et al. 2015).

    Classes are dimension 1, as for cross-entropy.
    """
    # Two similar distributions differ by less than half precision resolves.
    student, teacher = (x if x.dtype == torch.double else x.float() for x in (student, teacher.detach()))
    log_p = F.log_softmax(teacher / temperature, dim=1)
    log_q = F.log_softmax(student / temperature, dim=1)
    return temperature**2 * F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1).mean()


@dataclass(frozen=True)
class MutualDistillation:
    """weight * T^2 * { KL(S || P; T) + KL(P || S; T) }: each of two paths is the other's constant teacher.

    As a method's ``loss_key`` it says: the loss is the task's, summed over the two paths, plus this.
    """

    weight: float
    temperature: float

    def __call__(self, p: Tensor, s: Tensor) -> Tensor:
        return self.weight * (distill(p, s, self.temperature) + distill(s, p, self.temperature))
