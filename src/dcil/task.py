"""Task: the loss of one path, and what a distillation term must know of it (logits, classes, ignored positions)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcil.errors import UserError

Task = Callable[[Any, Any], Tensor]
#: Torch's default for labels that do not count.
IGNORED = -100


def find_logits(output: Any) -> Tensor:
    """The logits in a model's output: a tensor, ``.logits``, ``["logits"]``, or the first item of a tuple."""
    found = output
    if isinstance(output, Mapping):
        found = output.get("logits")
    elif not isinstance(output, Tensor):
        found = getattr(output, "logits", output[0] if isinstance(output, Sequence) and output else None)
    if not isinstance(found, Tensor):
        keys = f" with the keys {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
        raise UserError(
            f"the logits must be a tensor, .logits, ['logits'] or the first item of an output, got "
            f"{type(output).__name__}{keys}: pick them with net.loss(…, logits=lambda output: …)"
        )
    return found


@dataclass(frozen=True)
class Objective:
    """A user's task with everything that a method's loss asks about it; called as the task is.

    task        F.cross_entropy, a torch loss module, or any callable (output, target) -> scalar
    pick        finds the logits in an output
    valid       bool tensor of the positions that count, where the user gave one
    classes     numbers of outputs of the classifiers, to tell the class dimension by
    class_dim   the class dimension, where it was given
    parts       what the loss consists of, for the metrics; filled by ``Method.loss``
    """

    task: Task = F.cross_entropy
    pick: Callable[[Any], Tensor] = find_logits
    valid: Tensor | None = None
    classes: frozenset[int] = frozenset()
    class_dim: int | None = None
    parts: dict[str, Tensor | float] = field(default_factory=dict)

    @classmethod
    def of(cls, task: Task) -> Objective:
        return task if isinstance(task, Objective) else cls(task)

    def __call__(self, output: Any, target: Any) -> Tensor:
        """The loss of one path. Torch's own losses get the logits, classes first; other tasks the output as it is."""
        if self.function is not None:
            output = self.pick(output)
            if self.is_cross_entropy and isinstance(target, Tensor) and self.classes_last(output, target):
                output = output.movedim(-1, 1)
                target = target.movedim(-1, 1) if target.dim() == output.dim() else target
        loss = self.task(output, target)
        if not isinstance(loss, Tensor) or loss.dim():
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(f"the task must return a scalar loss, got {got}: use reduction='mean' or 'sum'")
        return loss

    # -- what kind of task it is -------------------------------------------------------------------------------------

    @property
    def function(self) -> str | None:
        """The name of torch's own loss that the task is, bound arguments aside; None for any other callable."""
        task = self.task.func if isinstance(self.task, functools.partial) else self.task
        if isinstance(task, nn.modules.loss._Loss):
            return type(task).__name__
        return task.__name__ if getattr(task, "__module__", None) == "torch.nn.functional" else None

    @property
    def is_cross_entropy(self) -> bool:
        return self.function in ("cross_entropy", "CrossEntropyLoss", "nll_loss", "NLLLoss")

    def argument(self, name: str, default: Any) -> Any:
        """An argument of the task: an attribute of a loss module, or a keyword of a partial function."""
        if isinstance(self.task, functools.partial) and name in self.task.keywords:
            return self.task.keywords[name]
        return getattr(self.task, name, default)

    @property
    def reduction(self) -> str:
        return str(self.argument("reduction", "mean"))

    # -- where the classes are, and which positions count ------------------------------------------------------------

    def classes_last(self, logits: Tensor, target: Tensor) -> bool:
        """Whether cross-entropy's classes are the last of several dimensions (batch, positions, classes)."""
        if logits.dim() < 3 or self.class_dim is not None:
            return logits.dim() >= 3 and self.class_dim in (-1, logits.dim() - 1)
        if target.dim() == logits.dim():  # probabilities instead of labels
            return logits.shape[-1] in self.classes and logits.shape[1] not in self.classes
        # Where both fit, classes come first, as torch has it.
        return target.shape == without(logits.shape, -1) and target.shape != without(logits.shape, 1)

    def find_class_dim(self, logits: Tensor) -> int:
        """The dimension with the classifier's outputs: 1 or the last; refused where both or neither may be meant."""
        if not logits.is_floating_point() or logits.dim() < 2:
            raise UserError(
                f"the logits must be a float tensor (batch, classes, …) for the KL terms, got {logits.dtype} of shape "
                f"{tuple(logits.shape)} (kl=0 trains without them, distill='sigmoid' or 'mse' needs no classes)"
            )
        if self.class_dim is not None:
            if not -logits.dim() <= self.class_dim < logits.dim():
                raise UserError(f"class_dim must be a dimension of the logits {tuple(logits.shape)}, "
                                f"got {self.class_dim}")  # fmt: skip
            return self.class_dim % logits.dim()
        last = logits.dim() - 1
        found = [dim for dim in dict.fromkeys((1, last)) if logits.shape[dim] in self.classes]
        if last == 1 or len(found) == 1:
            return found[0] if found else 1
        known = f"a classifier with {' or '.join(map(str, sorted(self.classes)))} outputs" if self.classes else "none"
        raise UserError(
            f"the class dimension of logits of shape {tuple(logits.shape)} must be unique, got {known}: "
            "name it with DCIL(class_dim=1) or DCIL(class_dim=-1)"
        )

    def counted(self, logits: Tensor, dim: int | None, target: Any) -> Tensor | None:
        """Which positions count, shaped like the logits without dimension ``dim``; None if all do."""
        shape = logits.shape if dim is None else without(logits.shape, dim)
        if self.valid is not None:
            if self.valid.shape not in (shape, logits.shape[: self.valid.dim()]):
                raise UserError(f"valid must have the shape {tuple(shape)}, got {tuple(self.valid.shape)}")
            return self.valid.bool()
        if not isinstance(target, Tensor) or target.is_floating_point() or dim is None:
            return None
        if self.is_cross_entropy:
            return target.ne(self.argument("ignore_index", IGNORED)).reshape(shape)
        if not target.is_cuda and bool((target < 0).any()):  # on a GPU this would wait for the device at every step
            raise UserError(
                "valid must be given when labels are negative (ignored) and the task is your own, got None: "
                "net.loss(…, valid=mask) says which positions count in the KL terms"
            )
        return None


def without(shape: torch.Size, dim: int) -> torch.Size:
    """The shape less one dimension."""
    dim %= len(shape)
    return torch.Size([*shape[:dim], *shape[dim + 1 :]])
