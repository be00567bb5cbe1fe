"""dcil: train neural networks sparse from the first step (Dynamic Collective Intelligence Learning and its peers)."""

from __future__ import annotations

from dcil.criteria import Criterion, Magnitude
from dcil.errors import UserError
from dcil.granularity import Filter, Granularity, Weight
from dcil.method import Method
from dcil.methods import DCIL, DPF, METHODS, Dense
from dcil.net import SparseNet, Update
from dcil.schedule import Cubic

__version__ = "0.1.0"

__all__ = [
    "DCIL",
    "DPF",
    "METHODS",
    "Criterion",
    "Cubic",
    "Dense",
    "Filter",
    "Granularity",
    "Magnitude",
    "Method",
    "SparseNet",
    "Update",
    "UserError",
    "Weight",
]
