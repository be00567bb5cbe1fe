"""Sparse networks on an ordinary CPU: ``export_plan`` writes a plan, ``load`` runs it.

Running needs numpy and the native module only; a deployment without torch imports the same names from
``dcil_runtime``. Writing a plan needs torch, which is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dcil.errors import missing_extra

try:
    from dcil_runtime import NativeMissing, Network, Plan, PlanError, instruction_set, load, write
except ModuleNotFoundError as error:
    raise missing_extra("dcil-runtime", "cpu") from error

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["NativeMissing", "Plan", "PlanError", "compile_plan", "export_plan", "instruction_set", "load"]


def export_plan(
    model: nn.Module, example: Tensor | Sequence[Tensor], out: Path, notes: dict[str, str] | None = None
) -> Network:
    """Write ``model`` (finalized or zero-filled) as a plan file; ``example`` is any batch of its input, or of several.

    An operator without a kernel is named with its module before anything is written.
    """
    from dcil.runtime.lower import lower

    network = lower(model, example)
    network.notes = dict(notes or {})
    write(network, out)
    return network


def compile_plan(model: nn.Module, example: Tensor | Sequence[Tensor], threads: int = 1, isa: str = "") -> Plan:
    """Return the plan of a torch module, without a file and without the limits on files from strangers."""
    from dcil.runtime.lower import lower

    return Plan(lower(model, example), threads, isa, max_memory=None, max_work=None)
