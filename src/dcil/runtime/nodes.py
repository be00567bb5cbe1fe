"""What a node of a recorded or exported graph is: its operator, its module, its memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node


def constants_of(program: torch.export.ExportedProgram) -> dict[str, Tensor]:
    signature, found = program.graph_signature, {}
    state: dict[str, Any] = {**program.state_dict, **program.constants}
    for table in (signature.inputs_to_parameters, signature.inputs_to_buffers):
        found.update({name: state[target] for name, target in table.items()})
    lifted = signature.inputs_to_lifted_tensor_constants
    return found | {name: state[target] for name, target in lifted.items()}


def name_of(node: Node) -> str:
    return str(node.target).removeprefix("aten.").partition(".")[0]


def owner_of(node: Any, views: Collection[str] = ()) -> Node:
    """Whose memory it is, in the same shape or through ``views`` too."""
    while node.op == "call_function" and (name_of(node).endswith("_") or name_of(node) in views):
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def module_of(node: Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return "the network"
    path, kind = stack[-1]
    kind = kind if isinstance(kind, str) else kind.__name__
    return f"module {path or 'the network itself'!r} ({kind.rpartition('.')[2]})"
