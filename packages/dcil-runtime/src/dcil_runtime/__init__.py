"""Run sparse networks on a CPU: numpy and a small native module, nothing else. ``load("net.dcil")(images)``."""

from __future__ import annotations

from dcil_runtime.format import Input, Network, Op, Output, PlanError, write
from dcil_runtime.native import NativeMissing, instruction_set
from dcil_runtime.plan import Plan, load, read

__version__ = "0.1.0"

__all__ = [
    "Input",
    "NativeMissing",
    "Network",
    "Op",
    "Output",
    "Plan",
    "PlanError",
    "instruction_set",
    "load",
    "read",
    "write",
]
