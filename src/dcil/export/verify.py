"""Compare what two networks compute: any number of inputs, any nest of outputs."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dcil.errors import UserError

Inputs = tuple[Tensor, ...]


def inputs_of(example: Tensor | Sequence[Tensor]) -> Inputs:
    """Return the arguments of the network's forward, on the CPU."""
    found = (example,) if isinstance(example, Tensor) else tuple(example)
    if not found or not all(isinstance(x, Tensor) and x.ndim and len(x) for x in found):
        raise UserError("the example must be a tensor, or a tuple of them, with the batch as the first dimension")
    if len({len(x) for x in found}) > 1:
        raise UserError(f"the inputs of an example are one batch; these have {[len(x) for x in found]} items")
    return tuple(x.detach().cpu() for x in found)


def computed(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Run a copy of the network, since a forward may write to buffers, and return the tensors among its outputs."""
    try:
        out = copy.deepcopy(model)(*inputs)
    except Exception as error:
        raise UserError(f"{type(model).__name__} does not run on the example input ({reason(error)})") from None
    leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    if not leaves:
        raise UserError(f"{type(model).__name__} returns no tensor")
    return leaves


def one_more(inputs: Inputs) -> Inputs:
    """Return a batch of one more, to detect a fixed batch size: noise, or for integers values from the example."""
    random = torch.Generator().manual_seed(0)

    def item(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return torch.randn(1, *x.shape[1:], generator=random).to(x.dtype)
        return x.flatten()[torch.randint(x.numel(), (x[:1].numel(),), generator=random)].reshape(1, *x.shape[1:])

    return tuple(torch.cat([x, item(x)]) for x in inputs)


def distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the largest difference; NaN where shapes differ or only one of two values is NaN."""
    if [x.shape for x in a] != [y.shape for y in b]:
        return float("nan")
    found = [0.0]
    for x, y in zip(a, b, strict=True):
        off = (x.double() - y.double()).abs()
        off = off.masked_fill(alike(x, y), 0)
        if bool(off.isnan().any()):
            return float("nan")
        found.append(float(off.max()) if off.numel() else 0.0)
    return max(found)


def alike(a: Tensor, b: Tensor) -> Tensor:
    """Return where two tensors are equal or both NaN."""
    return (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b


def size_of(outputs: Sequence[Tensor]) -> float:
    """Return the largest finite magnitude, at least 1."""
    return max([1.0, *(float(x[x.isfinite()].abs().max()) for x in outputs if x.isfinite().any())])


def reason(error: BaseException) -> str:
    """Return the first line of the root cause of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:200]
