"""The loss that a Hugging Face model computes itself: where it is in the output, and which positions it counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dcil.task import IGNORED, find_logits

#: What a batch holds, by the names of the model's arguments.
Batch = Mapping[str, Any]
SPAN = ("start_positions", "end_positions")


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


def pick_logits(output: Any) -> Tensor:
    """The logits in a model's output, beside the loss; of a question's answer, those of start and end together."""
    if has_span(output):
        return torch.stack([output["start_logits"], output["end_logits"]], 1)
    return find_logits(output[1:] if isinstance(output, tuple) and find_loss(output) is not None else output)


def has_span(output: Any) -> bool:
    return isinstance(output, Mapping) and {"start_logits", "end_logits"} <= set(output)


def labels_of(batch: Batch) -> Tensor | None:
    labels = batch.get("shift_labels")  # what the collator has shifted itself
    labels = batch.get("labels") if labels is None else labels
    return labels if isinstance(labels, Tensor) else None


def count_labels(batch: Batch, shifted: bool) -> Tensor:
    """How many labels of the batch count, at least 1, as transformers.Trainer counts them."""
    labels = labels_of(batch)
    assert labels is not None
    return (labels[..., 1:] if shifted and "shift_labels" not in batch else labels).ne(IGNORED).sum().clamp(min=1)


def valid_positions(output: Any, batch: Batch, logits: Tensor, shifted: bool, ignored: int) -> Tensor | None:
    """The positions that count in the KL terms; None if all do."""
    if has_span(output):
        return torch.stack([batch[name].reshape(-1) < logits.shape[-1] for name in SPAN], 1)
    labels = labels_of(batch)
    if labels is None or labels.is_floating_point():
        return None
    valid = labels != ignored
    if is_map(logits, labels):
        return F.interpolate(valid[:, None].float(), logits.shape[2:])[:, 0] > 0
    if shifted and "shift_labels" not in batch and labels.dim() > 1:
        valid = F.pad(valid[..., 1:], (0, 1), value=False)
    return valid.reshape(-1) if logits.dim() == 2 and valid.numel() == len(logits) else valid


def cross_entropies(output: Any, batch: Batch, logits: Tensor, ignored: int) -> dict[bool, Tensor]:
    """The cross-entropy of the logits, shifted against the labels (True) and not (False), as far as shapes allow."""
    logits, labels, found = logits.detach().float(), labels_of(batch), {}
    if has_span(output):
        length = logits.shape[-1]
        ends = [F.cross_entropy(logits[:, i], batch[name].reshape(-1).clamp(0, length), ignore_index=length)
                for i, name in enumerate(SPAN)]  # fmt: skip
        return {False: torch.stack(ends).mean()}
    if labels is None:
        return {}
    if labels.is_floating_point():
        return {False: F.cross_entropy(logits, labels)} if labels.shape == logits.shape and logits.dim() == 2 else {}
    if is_map(logits, labels):
        large = F.interpolate(logits, labels.shape[1:], mode="bilinear", align_corners=False)
        return {False: F.cross_entropy(large, labels, ignore_index=ignored)}
    classes = logits.shape[-1]
    if labels.numel() * classes == logits.numel():
        found[False] = F.cross_entropy(logits.reshape(-1, classes), labels.reshape(-1))
    if labels.shape == logits.shape[:-1] and labels.dim() > 1 and "shift_labels" not in batch:
        found[True] = F.cross_entropy(logits[..., :-1, :].reshape(-1, classes), labels[..., 1:].reshape(-1))
    return found


def is_map(logits: Tensor, labels: Tensor) -> bool:
    """Whether an image is segmented: logits (batch, classes, height, width), labels (batch, height, width)."""
    return logits.dim() == 4 and labels.dim() == 3


def shifts_labels(model: Any) -> bool:
    """Whether position t of a model's logits predicts label t + 1, as its class says."""
    decoder = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return decoder and any("ForCausalLM" in name or "LMHeadModel" in name for name in class_names(model))


def class_names(model: Any) -> list[str]:
    return [kind.__name__ for kind in type(model).__mro__]


def unwrap_adapters(model: Any) -> Any:
    """The model inside that of peft."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
