"""peft: merge adapters into pruned weights without losing the zeros.

net = dcil.SparseNet(get_peft_model(model, LoraConfig(…)), method, prunable=["*.base_layer.weight"])
sparse = merge(net)                         # the model that get_peft_model was given, adapters merged
"""

from __future__ import annotations

import re
from typing import Any

import torch

from dcil.errors import UserError
from dcil.net import SparseNet


@torch.no_grad()
def merge(net: SparseNet) -> Any:
    """The pruned network with its adapters merged, as the class that they were added to.

    An adapter adds to every weight, so the masks are applied again: what it added to pruned weights is lost, and the
    outputs differ from the pruned path's by that.
    """
    if not hasattr(net.model, "merge_and_unload"):
        raise UserError(f"merge needs a model of peft with adapters to merge, got {type(net.model).__name__}: "
                        "net.finalize() is all that another one needs")  # fmt: skip
    model = net.finalize().merge_and_unload()  # type: ignore[operator]
    for name, mask in net.masks.items():
        model.get_parameter(unwrapped_name(name)).masked_fill_(~mask, 0)
    return model


def unwrapped_name(name: str) -> str:
    """The name of a parameter in the model that peft was given."""
    name = re.sub(r"\.(base_layer|modules_to_save\.[^.]+|original_module)(?=\.)", "", name)
    return name.removeprefix("base_model.model.")
