"""Task: the loss of one path, and what a distillation term must know of it (logits, classes, ignored positions)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcil.errors import UserError, described

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


class Objective:
    """A user's task with everything that a method's loss asks about it; called as the task is.

    task        F.cross_entropy, a torch loss module, or any callable (output, target) -> scalar
    pick        finds the logits in an output
    valid       bool tensor of the positions that count, where the user gave one
    classes     numbers of outputs of the classifiers, to tell the class dimension by
    class_dim   the class dimension, where it was given
    parts       what the loss consists of, for the metrics; filled by ``Method.loss``

    Made anew inside of every loss, compiled ones included: no dataclass, whose ``replace`` torch 2.11 cannot trace.
    """

    def __init__(
        self,
        task: Task = F.cross_entropy,
        pick: Callable[[Any], Tensor] = find_logits,
        valid: Tensor | None = None,
        classes: frozenset[int] = frozenset(),
        class_dim: int | None = None,
        parts: dict[str, Tensor | float] | None = None,
    ) -> None:
        for name, function in {"task": task, "logits": pick}.items():
            if not callable(function) or isinstance(function, type):
                raise UserError(f"{name} must be a function or a module, got {described(function)}")
        self.task, self.pick, self.valid, self.classes, self.class_dim = task, pick, valid, classes, class_dim
        self.parts = {} if parts is None else parts

    def with_class_dim(self, dim: int | None) -> Objective:
        """The same with the class dimension that was given; the parts of the loss are shared."""
        return Objective(self.task, self.pick, self.valid, self.classes, dim, self.parts)

    @classmethod
    def of(cls, task: Task) -> Objective:
        return task if isinstance(task, Objective) else cls(task)

    def __call__(self, output: Any, target: Any) -> Tensor:
        """The loss of one path. Torch's own losses get the logits, classes first; other tasks the output as it is."""
        if self.function is not None:
            output = self.logits(output)
            if self.is_cross_entropy and isinstance(target, Tensor) and self.classes_last(output, target):
                soft = target.dim() == output.dim()
                output = output.flatten(0, -2)  # a view: classes in the second dimension would be a copy
                target = target.flatten(0, -2) if soft else target.flatten()
        loss = self.call(output, target)
        if not isinstance(loss, Tensor) or loss.dim():
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(f"the task must return a scalar loss, got {got}: use reduction='mean' or 'sum'")
        return loss

    def call(self, output: Any, target: Any) -> Any:
        """Call the task; what one of torch's own losses cannot take is refused with the shapes."""
        if self.function is None:
            return called(self.task, "task", "(output, target) -> scalar", output, target)
        try:
            return self.task(output, target)
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            if "CUDA" in str(error) or "memory" in str(error):  # not of these tensors
                raise
            raise UserError(
                f"{self.function} must get logits and a target that fit, got {kind(output)} and {kind(target)}: "
                f"{str(error).splitlines()[0]}"
            ) from error

    def logits(self, output: Any) -> Tensor:
        """The logits of a path's output."""
        found = called(self.pick, "logits", "(output) -> tensor", output)
        if not isinstance(found, Tensor):
            raise UserError(f"logits must return a tensor, got {type(found).__name__}")
        return found

    # -- what kind of task it is -------------------------------------------------------------------------------------

    @property
    def function(self) -> str | None:
        """The name of torch's own loss that the task is, bound arguments aside; None for any other callable."""
        task = self.task.func if isinstance(self.task, functools.partial) else self.task
        if isinstance(task, nn.Module):  # a subclass of your own may want the whole output
            return type(task).__name__ if type(task).__module__ == nn.modules.loss.__name__ else None
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
        one, last = (target.shape in (without(logits.shape, dim), logits.shape) for dim in (1, -1))
        if one and last and logits.shape[1] in self.classes and logits.shape[-1] in self.classes:
            raise self.ambiguous(logits)
        if target.dim() == logits.dim():  # probabilities instead of labels
            return logits.shape[-1] in self.classes and logits.shape[1] not in self.classes
        return last and not one  # where both fit, classes come first, as torch has it

    def ambiguous(self, logits: Tensor) -> UserError:
        known = f"a classifier with {' or '.join(map(str, sorted(self.classes)))} outputs" if self.classes else "none"
        return UserError(
            f"the class dimension of logits of shape {tuple(logits.shape)} must be unique, got {known}: name it with "
            "DCIL(class_dim=1) or DCIL(class_dim=-1), elsewhere with a task of your own such as "
            "lambda output, y: F.cross_entropy(output.movedim(-1, 1), y)"
        )

    def find_class_dim(self, logits: Tensor, target: Any = None) -> int:
        """The dimension with the classifier's outputs: 1 or the last; refused where both or neither may be meant.

        Labels tell it too: they have the shape of the logits without the classes.
        """
        if not logits.is_floating_point() or logits.dim() < 2:
            raise UserError(
                f"the logits must be a float tensor (batch, classes, …) for the KL terms, got {logits.dtype} of shape "
                f"{tuple(logits.shape)} (kl=0 trains without them, distill='sigmoid' or 'mse' needs no classes)"
            )
        last = logits.dim() - 1
        if self.class_dim is not None:
            allowed = (1, last) if self.is_cross_entropy else range(logits.dim())
            if not -logits.dim() <= self.class_dim < logits.dim() or self.class_dim % logits.dim() not in allowed:
                what = "1 or the last dimension" if self.is_cross_entropy else "a dimension"
                raise UserError(f"class_dim must be {what} of the logits {tuple(logits.shape)}, got {self.class_dim}")
            return self.class_dim % logits.dim()
        if last == 1:
            return 1
        found = [dim for dim in (1, last) if logits.shape[dim] in self.classes]
        labels = isinstance(target, Tensor) and not target.is_floating_point() and target.dim() == last
        told = [dim for dim in (1, last) if labels and target.shape == without(logits.shape, dim)]
        if self.is_cross_entropy and len(told) == 1:
            return told[0]
        if len(found) != 1 or (told and found[0] not in told):
            raise self.ambiguous(logits)
        return found[0]

    def counted(self, logits: Tensor, dim: int | None, target: Any) -> Tensor | None:
        """Which positions count, shaped like the logits without dimension ``dim``; None if all do."""
        shape = logits.shape if dim is None else without(logits.shape, dim)
        if self.valid is not None:
            if not isinstance(self.valid, Tensor) or self.valid.dtype != torch.bool:
                got = self.valid.dtype if isinstance(self.valid, Tensor) else type(self.valid).__name__
                raise UserError(f"valid must be a bool tensor, True where a position counts, got {got}: pass "
                                "mask.bool() for a mask of 0 and 1")  # fmt: skip
            if self.valid.shape != shape[: self.valid.dim()]:
                raise UserError(f"valid must have the shape {tuple(shape)}, got {tuple(self.valid.shape)}")
            return self.valid.to(logits.device)
        if not isinstance(target, Tensor) or target.is_floating_point():
            return None
        if self.is_cross_entropy:
            counted = target.ne(self.argument("ignore_index", IGNORED))
            classes = -1 if logits.dim() == 1 or self.classes_last(logits, target) else 1
            return counted if dim is not None else counted.unsqueeze(classes)
        if dim is None:
            return None
        if not target.is_cuda and bool((target < 0).any()):  # on a GPU this would wait for the device at every step
            raise UserError(
                "valid must be given when labels are negative (ignored) and the task is your own, got None: "
                "net.loss(…, valid=mask) says which positions count in the KL terms"
            )
        return None


def called(function: Callable[..., Any], what: str, form: str, *args: Any) -> Any:
    """Call a function of the user's; one that does not take these arguments is refused."""
    if isinstance(function, type):
        raise UserError(f"{what} must be a function {form}, got {described(function)}: make an object of it")
    try:
        return function(*args)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # raised inside of it
            raise
        raise UserError(f"{what} must be a function {form}, got one that cannot be called so: {error}") from error


def kind(value: Any) -> str:
    """A tensor's dtype and shape, another value's type."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else described(value)


def without(shape: torch.Size, dim: int) -> torch.Size:
    """The shape less one dimension."""
    dim %= len(shape)
    return torch.Size([*shape[:dim], *shape[dim + 1 :]])
