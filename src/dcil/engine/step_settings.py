"""Settings that decide what a step computes besides the method: part of a run's config, unlike EngineSettings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcil import SparseNet


def by_target(logits: Tensor) -> Tensor:
    """Return the logits with one row per target: (N, C) of images as they are, (N, T, C) of tokens as (N T, C)."""
    return logits.flatten(0, -2)


@dataclass(frozen=True)
class StepSettings:
    """
    label_smoothing   part of each target that is spread evenly over the classes (Szegedy et al., CVPR 2016)
    clip_norm         largest norm of the gradient of all parameters together; 0: any (Pascanu et al., ICML 2013)
    """

    label_smoothing: float = 0.0
    clip_norm: float = 0.0

    @property
    def task(self) -> Callable[..., Tensor]:
        """The loss of one path."""
        return (
            partial(F.cross_entropy, label_smoothing=self.label_smoothing) if self.label_smoothing else F.cross_entropy
        )

    def loss(self, net: SparseNet, outputs: Mapping[str, Tensor], y: Tensor) -> Tensor:
        """Return the method's loss of a batch, the mean over its targets."""
        return net.loss(outputs, y.flatten(), self.task, logits=by_target)

    def clip(self, parameters: Iterable[nn.Parameter]) -> None:
        """Clip the gradients, in place and without waiting for the device."""
        if self.clip_norm:
            torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm)


PLAIN = StepSettings()
