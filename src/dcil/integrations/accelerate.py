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
import torch.nn.functional as F
from torch import Tensor, nn

from dcil.errors import UserError
from dcil.method import Method
from dcil.net import SparseNet
from dcil.task import find_logits

IGNORED = -100
SPAN = ("start_positions", "end_positions")


class SparseModel(SparseNet):
    """A SparseNet for models that compute their own loss from labels.

    In training it returns the pruned path's output with the loss of all paths in it, without labels what SparseNet
    returns. The KL terms take the positions that the loss counts. No name is trusted for that: the first batch tells
    whether the loss is the cross-entropy of the logits, and whether position t predicts label t or t + 1.

    logits    finds the logits in an output, where they are not its ``logits``
    choices   prunable, private, classifier and masks of SparseNet
    """

    def __init__(
        self, model: nn.Module, method: Method, *, logits: Callable[[Any], Tensor] | None = None, **choices: Any
    ) -> None:
        assumed = getattr(method, "distill", "") is None
        if assumed:  # checked with the first batch
            dim = getattr(method, "class_dim", None)
            settings = {"distill": "softmax", "class_dim": -1 if dim is None else dim}
            method = replace(method, **settings)  # type: ignore[arg-type]
        super().__init__(model, method, **choices)
        base = unwrap_adapters(model)
        parameters = inspect.signature(base.forward).parameters.values()
        variadic = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        self.accepts_items = bool(getattr(base, "accepts_loss_kwargs", variadic))
        self.shifted = self.shifted_count = shifts_labels(base)
        self.recognised, self.assumed = False, assumed and getattr(method, "kl", 0) > 0
        self.find_logits = logits

    def forward(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        """``num_items_in_batch``: the labels that count in all batches of the optimizer step together."""
        share = None
        if num_items_in_batch is not None:
            items = self.count(kwargs)
            share = items / num_items_in_batch
            if self.accepts_items:
                # Some models divide by it, others ignore it: with this batch's own number both return its mean.
                kwargs["num_items_in_batch"] = items
        outputs = super().forward(*args, **kwargs)
        output = outputs["pruned"] if self.training else outputs
        loss = find_loss(output)
        if loss is None or (share is None and not self.training):
            return outputs
        loss = self.loss_of_all(outputs, kwargs, own_loss) if self.training else loss
        return with_loss(output, loss if share is None else loss * share)

    def loss_of_all(self, outputs: Mapping[str, Any], batch: Mapping[str, Any], task: Callable[..., Tensor]) -> Tensor:
        """The loss over all paths: ``task(output, labels)`` on each, and the KL terms."""
        labels, output = batch.get("labels"), outputs["pruned"]
        if not self.recognised:
            self.recognise(output, batch, task(output, labels).detach())
        find = self.find_logits or (span_logits if has_span(output) else None)
        return self.loss(outputs, labels, task=task, logits=find, valid=self.valid(output, batch))

    @torch.no_grad()
    def probe(self, batch: Mapping[str, Any]) -> None:
        """Recognise the model's loss ahead of the first step."""
        training = self.training
        output = self.eval().path("pruned", **batch)
        self.train(training)
        if (loss := find_loss(output)) is not None:
            self.recognise(output, batch, loss)

    def recognise(self, output: Any, batch: Mapping[str, Any], loss: Tensor) -> None:
        """Compare the model's loss with the cross-entropy of its logits, shifted and not."""
        auxiliary = output.get("aux_loss") if isinstance(output, Mapping) else None
        if isinstance(auxiliary, Tensor):
            loss = loss - unwrap_adapters(self.model).config.router_aux_loss_coef * auxiliary
        found = cross_entropies(output, batch, self.find_logits)
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

    def valid(self, output: Any, batch: Mapping[str, Any]) -> Tensor | None:
        """The positions that count in the KL terms; None if all do."""
        if has_span(output):
            length = output["start_logits"].shape[1]
            return torch.stack([batch[name].reshape(-1) < length for name in SPAN], 1)
        labels = batch.get("shift_labels", batch.get("labels"))
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return None
        valid = labels != IGNORED
        if self.shifted and "shift_labels" not in batch and labels.dim() > 1:
            valid = F.pad(valid[..., 1:], (0, 1), value=False)
        return valid

    def count(self, batch: Mapping[str, Any]) -> Tensor:
        """How many labels of the batch count, at least 1, as transformers.Trainer counts them."""
        labels = batch.get("shift_labels", batch.get("labels"))
        assert isinstance(labels, Tensor), "num_items_in_batch without labels"
        shifted = self.shifted_count and "shift_labels" not in batch
        return (labels[..., 1:] if shifted else labels).ne(IGNORED).sum().clamp(min=1)


def unwrap_adapters(model: Any) -> Any:
    """The model inside that of peft."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def shifts_labels(model: Any) -> bool:
    """Whether position t of a model's logits predicts label t + 1, as its class says."""
    decoder = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    names = " ".join(kind.__name__ for kind in type(model).__mro__)
    return decoder and ("ForCausalLM" in names or "LMHeadModel" in names)


def has_span(output: Any) -> bool:
    """Whether the model answers questions: one row of logits for the start and one for the end."""
    return isinstance(output, Mapping) and {"start_logits", "end_logits"} <= set(output)


def span_logits(output: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([output["start_logits"], output["end_logits"]], 1)


def cross_entropies(
    output: Any, batch: Mapping[str, Any], find: Callable[[Any], Tensor] | None
) -> dict[bool, Tensor]:
    """The cross-entropy of the logits, shifted against the labels (True) and not (False), as far as shapes allow."""
    if has_span(output):
        length = output["start_logits"].shape[1]
        targets = torch.stack([batch[name].reshape(-1).clamp(0, length) for name in SPAN], 1)
        logits = span_logits(output).float().flatten(0, 1)
        each = F.cross_entropy(logits, targets.flatten(), ignore_index=length, reduction="none").view_as(targets)
        return {False: (each.sum(0) / (targets < length).sum(0)).mean().detach()}
    logits, labels = (find or find_logits)(output).detach().float(), batch.get("shift_labels", batch.get("labels"))
    classes, found = logits.shape[-1], {}
    if not isinstance(labels, Tensor):
        return {}
    if labels.is_floating_point():
        return {False: F.cross_entropy(logits, labels)} if labels.shape == logits.shape and logits.dim() == 2 else {}
    if labels.numel() * classes == logits.numel():
        found[False] = F.cross_entropy(logits.reshape(-1, classes), labels.reshape(-1))
    if labels.shape == logits.shape[:-1] and labels.dim() > 1 and "shift_labels" not in batch:
        found[True] = F.cross_entropy(logits[..., :-1, :].reshape(-1, classes), labels[..., 1:].reshape(-1))
    return found


def own_loss(output: Any, labels: Any = None) -> Tensor:
    """The task of a model that computes its own loss."""
    loss = find_loss(output)
    assert loss is not None
    return loss


def find_loss(output: Any) -> Tensor | None:
    """The loss in a model's output, or None."""
    if isinstance(output, Mapping):
        return output.get("loss")
    first = output[0] if isinstance(output, tuple) and output else None
    return first if isinstance(first, Tensor) and not first.dim() else None


def with_loss(output: Any, loss: Tensor) -> Any:
    """The output with another loss in it."""
    if isinstance(output, tuple):
        return (loss, *output[1:])
    output["loss"] = loss
    return output
