"""What a node of a traced graph says about its operator."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx import Node


def name_of(node: Node) -> str:
    """Return an operator's name, with its namespace unless it is ATen's."""
    schema = getattr(node.target, "_schema", None)
    return "getitem" if schema is None else str(schema.name).removeprefix("aten::")


#: Operators whose sizes may be those of the batch wherever they stand: the number of elements fixes the rest.
RESHAPES = ("view", "reshape", "flatten", "unflatten")
#: Operators that make a constant of the sizes that come first.
MADE = ("zeros", "ones", "new_zeros", "new_ones", "full", "new_full")


def depends_on_batch(node: Node) -> bool:
    """Return whether an operator takes numbers that depend on the batch as something else than its first size."""
    if name_of(node) in RESHAPES:
        return False
    sizes = node.args[0 if name_of(node) in MADE[:2] or name_of(node) == "full" else 1 :]
    if name_of(node) in (*MADE, "expand") and sizes and isinstance(sizes[0], (list, tuple)):
        sizes = (sizes[0][1:], *sizes[1:])
    return any("shape" not in n.meta for n in _nodes(sizes)) or any("shape" not in n.meta for n in _nodes(node.kwargs))


def _nodes(argument: Any) -> list[Node]:
    found: list[Node] = []
    fx.map_arg(argument, lambda n: found.append(n) or n)  # type: ignore[func-returns-value]
    return found


def shape_of(node: Any) -> tuple[int, ...]:
    found: tuple[int, ...] = node.meta["shape"]
    return found


def argument(node: Node, place: int, default: Any) -> Any:
    return node.args[place] if place < len(node.args) else default


def pair(value: Any) -> tuple[int, int]:
    return (value[0], value[0]) if len(value) == 1 else (value[0], value[1])
