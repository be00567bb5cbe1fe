"""Carry optimizer state to the small network, so that training can continue."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcil.errors import UserError
from dcil.export.compact.shrink import Compact


@torch.no_grad()
def carry_optimizer(old: Optimizer, large: nn.Module, new: Optimizer, small: Compact) -> None:
    """Copy momentum, steps and settings from ``old``, over ``large``, to ``new``, over ``small.model``'s parameters.

    ``large`` is the module whose parameters ``old`` holds (``net.model`` of a SparseNet), not its finalized copy.
    Parameters that the large network does not have (folded constants) start without state.
    """
    sources = dict(large.named_parameters(remove_duplicate=False))
    for name, parameter in small.model.named_parameters():
        cut = small.cuts.get(name)
        if cut is None:
            continue
        if cut.source not in sources:
            raise UserError(f"{name} comes from {cut.source}, which the large network does not have")
        source = sources[cut.source]
        for key, value in old.state.get(source, {}).items():
            # Tensors of another shape than the weights, such as counters, are copied whole.
            if isinstance(value, Tensor):
                value = cut(value) if value.shape == source.shape else value.clone()
            new.state[parameter][key] = value
    if len(old.param_groups) == len(new.param_groups):
        for before, after in zip(old.param_groups, new.param_groups, strict=True):
            after.update({key: value for key, value in before.items() if key != "params"})
