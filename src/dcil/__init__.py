"""dcil: train neural networks sparse from the first step (Dynamic Collective Intelligence Learning and its peers)."""

from __future__ import annotations

from dcil.criteria import OBD, OBS, Criterion, Gradient, Magnitude, Taylor
from dcil.errors import UserError
from dcil.granularity import NM, Filter, Granularity, Weight
from dcil.method import Method, Phase, StepContext
from dcil.methods import (
    DCIL,
    DNS,
    DPF,
    DSR,
    FPGM,
    GMP,
    METHODS,
    MIL,
    SET,
    SFP,
    SM,
    AutoPrune,
    Dense,
    L1Filter,
    OneShot,
    Rewind,
    RigL,
)
from dcil.net import SparseNet, Update
from dcil.schedule import Cubic
from dcil.scope import ERK, Global, Scope, Uniform

__version__ = "0.1.0"

__all__ = [
    "DCIL",
    "DNS",
    "DPF",
    "DSR",
    "ERK",
    "FPGM",
    "GMP",
    "METHODS",
    "MIL",
    "NM",
    "OBD",
    "OBS",
    "SET",
    "SFP",
    "SM",
    "AutoPrune",
    "Criterion",
    "Cubic",
    "Dense",
    "Filter",
    "Global",
    "Gradient",
    "Granularity",
    "L1Filter",
    "Magnitude",
    "Method",
    "OneShot",
    "Phase",
    "Rewind",
    "RigL",
    "Scope",
    "SparseNet",
    "StepContext",
    "Taylor",
    "Uniform",
    "Update",
    "UserError",
    "Weight",
]
