"""The loss of a recorded step: one kernel where there is one for it, else the method's own, compiled as the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dcil import SparseNet
from dcil.distillation import MutualDistillation
from dcil.engine import kernels
from dcil.engine.executor import Loss, Outputs

MAX_CLASSES = 2**12  # a program of the kernel holds a row of logits
#: The logits of both paths, a row for each target, and the targets.
Rows = tuple[Tensor, Tensor, Tensor]


def recorded_loss(
    net: SparseNet,
    own: Loss,
    rows: Callable[[Outputs, Any], Rows | None],
    backend: str | None = None,
    ignored: int | None = None,
) -> Loss:
    """Return the loss of a batch from the outputs of all paths and the target.

    own      computes it for every method and task
    rows     what the kernel would compute it from; None where ``own`` is more than cross-entropies and KL terms
    backend  of torch.compile, for ``own``
    ignored  the target that does not count; the terms of the loss are then kept for ``net.metrics()`` too
    """
    general = own if backend is None else torch.compile(own, backend=backend, dynamic=False)

    def loss(outputs: Outputs, target: Any) -> Tensor:
        key, found = net.method.loss_key(net.steps_done), None
        softmax = isinstance(key, MutualDistillation) and key.kind == "softmax" and not net.method.adds_gradient
        if kernels.AVAILABLE and softmax:
            found = rows(outputs, target)
        if found is None or not found[0].is_cuda or found[0].shape[1] > MAX_CLASSES:
            return general(outputs, target)
        assert isinstance(key, MutualDistillation)
        total, terms = kernels.loss.dcil_loss(*found, key.weight, key.temperature, ignored)
        if ignored is not None:
            pruned, super_, kl = terms.sum(1).unbind()
            net._parts = {"loss/pruned": pruned, "loss/super": super_, "kl_weight": key.weight}
            net._parts = net._parts | ({"loss/kl": kl} if key.weight else {})
        return total

    return loss
