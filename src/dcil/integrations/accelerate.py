"""accelerate, and any loop over a Hugging Face model: a SparseNet that returns the loss as the model itself does.

model = SparseModel(model, dcil.DCIL(sparsity=0.9, steps=10_000))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.unwrap_model(model).attach(optimizer)
loss = model(**batch).loss                  # of all paths; the other outputs are the pruned path's
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dcil.errors import UserError
from dcil.integrations import model_loss
from dcil.integrations.model_loss import Batch
from dcil.method import Method
from dcil.net import SparseNet
from dcil.task import IGNORED


class SparseModel(SparseNet):
    """A SparseNet for models that compute their own loss from labels.

    In training it returns the pruned path's output with the loss of all paths in it, without labels what SparseNet
    returns. The KL terms take the positions that the loss counts. No name is trusted for that: the first batch tells
    whether the loss is the cross-entropy of the logits, and whether position t predicts label t or t + 1.

    logits    finds the logits in an output, where they are not its ``logits``
    valid     (output, batch) -> bool tensor of the positions that count, where the labels do not tell
    choices   prunable, private, classifier and masks of SparseNet
    """

    def __init__(
        self, model: nn.Module, method: Method, *, logits: Callable[[Any], Tensor] = model_loss.pick_logits,
        valid: Callable[[Any, Batch], Tensor | None] | None = None, **choices: Any,
    ) -> None:  # fmt: skip
        base: Any = model_loss.unwrap_adapters(model)
        assumed = getattr(method, "distill", "") is None
        settings: dict[str, Any] = {"distill": "softmax"} if assumed else {}  # checked with the first batch
        if getattr(method, "class_dim", 0) is None:
            settings["class_dim"] = 1 if any("Segmentation" in name for name in model_loss.class_names(base)) else -1
        method = replace(method, **settings) if settings else method
        super().__init__(model, method, **choices)
        parameters = inspect.signature(base.forward).parameters
        variadic = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self.arguments = list(parameters)
        self.accepts_items = bool(getattr(base, "accepts_loss_kwargs", variadic))
        self.ignored = int(getattr(getattr(base, "config", None), "semantic_loss_ignore_index", IGNORED))
        self.shifted = self.shifted_count = model_loss.shifts_labels(base)
        self.distils = getattr(method, "kl", 0) > 0
        self.recognised, self.assumed = False, assumed and self.distils
        self.find_logits, self.find_valid = logits, valid

    @property
    def loss_type(self) -> str | None:
        """By this transformers.Trainer knows whether to count a row's first label, which nothing predicts."""
        return "ForCausalLM" if self.shifted_count else None

    def forward(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        """``num_items_in_batch``: the labels that count in all batches of the optimizer step together."""
        batch = dict(zip(self.arguments, args, strict=False)) | kwargs
        share = None
        if num_items_in_batch is not None and model_loss.labels_of(batch) is not None:
            items = model_loss.count_labels(batch, self.shifted_count)
            share = items / num_items_in_batch
            if self.accepts_items:
                # Some models divide by it, others ignore it: with this batch's own number both return its mean.
                kwargs["num_items_in_batch"] = items
        outputs = super().forward(*args, **kwargs)
        output = outputs["pruned"] if self.training else outputs
        loss = model_loss.find_loss(output)
        if loss is None or (share is None and not self.training):
            return outputs
        loss = self.loss_of_all(outputs, batch, own_loss) if self.training else loss
        return model_loss.with_loss(output, loss if share is None else loss * share)

    def loss_of_all(self, outputs: Mapping[str, Any], batch: Batch, task: Callable[..., Tensor]) -> Tensor:
        """The loss over all paths: ``task(output, labels)`` on each, and the KL terms."""
        labels, output = batch.get("labels"), outputs["pruned"]
        if not self.recognised:
            self.recognise(output, batch, task(output, labels).detach())
        valid = None
        if self.find_valid is not None:
            valid = self.find_valid(output, batch)
        elif self.distils:
            valid = model_loss.valid_positions(output, batch, self.find_logits(output), self.shifted, self.ignored)
        return self.loss(outputs, labels, task=task, logits=self.find_logits, valid=valid)

    @torch.no_grad()
    def probe(self, batch: Batch) -> None:
        """Recognise the model's loss ahead of the first step."""
        training = self.training
        output = self.eval().path("pruned", **batch)
        self.train(training)
        if (loss := model_loss.find_loss(output)) is not None:
            self.recognise(output, batch, loss)

    def recognise(self, output: Any, batch: Batch, loss: Tensor) -> None:
        """Compare the model's loss with the cross-entropy of its logits, shifted and not."""
        auxiliary = output.get("aux_loss") if isinstance(output, Mapping) else None
        if isinstance(auxiliary, Tensor):  # of a mixture of experts
            loss = loss - model_loss.unwrap_adapters(self.model).config.router_aux_loss_coef * auxiliary.detach()
        try:
            found = model_loss.cross_entropies(output, batch, self.find_logits(output), self.ignored)
        except UserError:  # without KL terms nobody needs the logits
            if self.distils:
                raise
            found = {}
        if not all(map(torch.isfinite, (loss, *found.values()))):
            return  # nothing counts in this batch: the next one tells
        self.recognised = True
        tolerance = (1e-5 if loss.dtype in (torch.float, torch.double) else 1e-2) * max(1.0, abs(float(loss)))
        close = [shifted for shifted, value in found.items() if abs(float(value - loss)) <= tolerance]
        if len(close) == 1:
            self.shifted = close[0]
        elif not close and self.assumed:
            raise UserError(
                f"{type(self.method).__name__}: distill must be named, since the loss of {type(self.model).__name__} "
                "is not the cross-entropy of its logits: 'softmax', 'sigmoid', 'mse' or a callable "
                "(kl=0 trains without KL terms)"
            )


def own_loss(output: Any, labels: Any) -> Tensor:
    """The task of a model that computes its own loss."""
    loss = model_loss.find_loss(output)
    assert loss is not None
    return loss
