"""What a node of a traced graph says about its operator."""

from __future__ import annotations

from typing import Any

from torch.fx import Node


def name_of(node: Node) -> str:
    """Return an operator's name, with its namespace unless it is ATen's."""
    schema = getattr(node.target, "_schema", None)
    return "getitem" if schema is None else str(schema.name).removeprefix("aten::")


def shape_of(node: Any) -> tuple[int, ...]:
    found: tuple[int, ...] = node.meta["shape"]
    return found


def argument(node: Node, place: int, default: Any) -> Any:
    return node.args[place] if place < len(node.args) else default


def pair(value: Any) -> tuple[int, int]:
    return (value[0], value[0]) if len(value) == 1 else (value[0], value[1])
