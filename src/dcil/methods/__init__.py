"""The methods, one short file each. A new one is a file and a line in METHODS."""

from __future__ import annotations

from dcil.method import Method
from dcil.methods.dcil import DCIL
from dcil.methods.dense import Dense
from dcil.methods.dpf import DPF

METHODS: dict[str, type[Method]] = {
    "dense": Dense,
    "dpf": DPF,
    "dcil": DCIL,
}

__all__ = ["DCIL", "DPF", "METHODS", "Dense"]
