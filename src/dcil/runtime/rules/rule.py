"""The type of a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from torch.fx import Node

from dcil.runtime.build import Value
from dcil.runtime.forms import Placed

if TYPE_CHECKING:
    from dcil.runtime.lower import Lowering

#: Returns a Value where the result lies in order, a list for several results.
Rule: TypeAlias = "Callable[[Lowering, Node], Value | Placed | list[Placed]]"
