"""timm: a training task for its train script; parameter groups need nothing, since SparseNet answers for its model."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dcil import SparseNet
from dcil.errors import UserError, missing_extra

try:
    from timm.task import ClassificationTask
    from timm.utils import unwrap_model
except ImportError as error:
    raise missing_extra("timm", "vision") from error


class SparseTask(ClassificationTask):
    """timm's ClassificationTask with the loss of every path; "output" is the pruned path's, for the metrics.

    net = dcil.SparseNet(model, dcil.DCIL(sparsity=0.9, steps=60_000, distill="softmax"))
    net.attach(optimizer)
    task = SparseTask(net, criterion, device=device)
    """

    def __init__(self, model: SparseNet, criterion: Any, **settings: Any) -> None:
        if not isinstance(model, SparseNet):
            raise UserError(
                f"SparseTask must get a dcil.SparseNet, got {type(model).__name__}: SparseNet(model, method)"
            )
        super().__init__(model, criterion, **settings)

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        outputs = self.trainable_module(input)
        if not self.trainable_module.training:
            return {"loss": self.criterion(outputs, target), "output": outputs}
        loss = unwrap_model(self.trainable_module).loss(outputs, target, task=self.criterion)
        return {"loss": loss, "output": outputs["pruned"]}
