"""Batch shares: a path may compute the first samples of each batch alone, and its loss is that of these.

A loader's batches are random, so the first samples of one are as good as any others: a mean over them has the
expectation of the mean over all, and the gradient with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dcil.errors import UserError, described

#: Inputs that are the same for every sample.
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def count_samples(size: int, share: float) -> int:
    """Return how many of ``size`` samples a share is: rounded up, so at least one."""
    return min(size, max(1, math.ceil(share * size - 1e-9)))  # 0.07 * 100 is a little more than 7


def first_samples(args: tuple[Any, ...], kwargs: Mapping[str, Any], share: float) -> tuple[Any, dict[str, Any]]:
    """Return the inputs of a network for the first samples of the batch, which is every tensor's first dimension."""
    if share == 1:
        return args, dict(kwargs)
    tensors: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        collect(value, tensors)
    sizes = sorted({len(tensor) for tensor in tensors} - {1})  # 1 is broadcast to all samples
    if len(sizes) > 1:
        raise UserError(
            f"the inputs must have one batch size where a path computes a share of the batch, got tensors of first "
            f"dimensions {', '.join(map(str, sizes))} (super_share=1 gives every path all of it)"
        )
    size = sizes[0] if sizes else 1
    rows = count_samples(size, share)

    def first(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[:rows] if value.dim() and len(value) == size else value
        return type(value)({key: first(item) for key, item in value.items()}) if isinstance(value, Mapping) else value  # type: ignore[call-arg]

    return tuple(map(first, args)), {key: first(value) for key, value in kwargs.items()}


def collect(value: Any, tensors: list[Tensor]) -> None:
    """Append the tensors that have a batch; what cannot be divided into samples is refused."""
    if isinstance(value, Mapping):
        for item in value.values():
            collect(item, tensors)
    elif isinstance(value, Tensor):
        tensors += [value] if value.dim() else []
    elif not isinstance(value, PLAIN):
        raise UserError(
            f"the inputs must be tensors, or mappings of them, where a path computes a share of the batch, got "
            f"{described(value)} (super_share=1 gives every path all of it)"
        )


def first_targets(target: Any, rows: int, of: int) -> Any:
    """Return the part of the target that belongs to the first ``rows`` of ``of`` rows of logits."""
    if isinstance(target, Mapping):
        return type(target)({key: first_targets(item, rows, of) for key, item in target.items()})  # type: ignore[call-arg]
    if type(target) is tuple:
        return tuple(first_targets(item, rows, of) for item in target)
    if isinstance(target, Tensor) and target.dim():
        several = of // max(1, len(target))  # rows of logits for each target: tokens of a sequence, say
        if several * len(target) == of and rows % max(1, several) == 0:
            return target[: rows // max(1, several)]
    elif isinstance(target, (*PLAIN, Tensor)):
        return target
    got = f"a tensor of shape {tuple(target.shape)}" if isinstance(target, Tensor) else described(target)
    raise UserError(
        f"the target must be tensors of {of} rows, as the logits, where a path computes {rows} of them, got {got} "
        "(super_share=1 gives every path all of it)"
    )


def targets_by_path(outputs: Mapping[str, Any], target: Any, logits: Callable[[Any], Tensor]) -> dict[str, Any]:
    """Return the target of each path: of the samples that it computed, which its logits count."""
    rows = {path: len(logits(output)) for path, output in outputs.items()}
    of = max(rows.values())
    return {path: target if number == of else first_targets(target, number, of) for path, number in rows.items()}
