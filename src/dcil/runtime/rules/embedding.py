"""Embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from dcil.runtime.forms import Placed
from dcil.runtime.nodes import shape_of
from dcil.runtime.rules.rule import Rule
from dcil.tracing import BATCH_SIZES

if TYPE_CHECKING:
    from dcil.runtime.lower import Lowering


def embedding(low: Lowering, node: Node) -> Placed:
    """Lower embedding(weight, numbers): the rows become the channels of tokens."""
    table = low.tensor(node, 0).float()
    source: Any = node.args[1]
    placed = low.placed(node, source)
    if placed.value not in low.builder.inputs or placed.index is not None or len(shape_of(source)) != 2:
        raise low.refuse(node, "numbers that are computed; only an input, or constants")
    length, width = placed.shape[0], table.shape[1]
    value = low.builder.embedding(placed.value, table.numpy(), length)
    index = torch.arange(BATCH_SIZES[0] * width * length).reshape(BATCH_SIZES[0], width, length).transpose(1, 2)
    return Placed(value, (width, 1, length), index)


RULES: dict[str, Rule] = {"embedding": embedding}
