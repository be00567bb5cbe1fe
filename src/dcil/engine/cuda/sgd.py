"""Apply SGD to flat parameters: torch.optim.SGD's arithmetic with the learning rate on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dcil.engine import kernels


@dataclass(frozen=True)
class SGD:
    """Updates w by its gradient g, with velocity v:

    d = g + decay * w
    v = momentum * v + d
    w = w - lr * (d + momentum * v)        (Nesterov; else w - lr * v, or w - lr * d without momentum)
    """

    momentum: float
    decay: float
    nesterov: bool

    @classmethod
    def from_optimizer(cls, optimizer: torch.optim.SGD) -> SGD:
        """Take the settings of the optimizer's one group (see ``choose.is_plain_sgd``)."""
        (group,) = optimizer.param_groups
        return cls(group["momentum"], group["weight_decay"], group["nesterov"])

    def step(self, w: Tensor, g: Tensor, v: Tensor, minus_lr: Tensor, diverged: Tensor, exact: bool = True) -> None:
        """Update ``w`` and ``v`` in place; ``w`` stays as it is if ``diverged`` (an integer on the device) is not 0.

        Without ``exact`` one kernel does it, whose rounding may differ from torch's in the last bit.
        """
        if not exact and kernels.AVAILABLE and w.is_cuda:
            speed = v if self.momentum else None
            kernels.sgd.step(w, g, speed, minus_lr, diverged, self.decay, self.momentum, self.nesterov)
            return
        d = torch.add(g, w, alpha=self.decay) if self.decay else g
        if self.momentum:
            v.mul_(self.momentum).add_(d)
            d = torch.add(d, v, alpha=self.momentum) if self.nesterov else v
        w.copy_(torch.where(diverged == 0, torch.addcmul(w, d, minus_lr), w))
