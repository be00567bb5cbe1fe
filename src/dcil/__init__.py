"""dcil: train neural networks sparse from the first step (Dynamic Collective Intelligence Learning and its peers)."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import dcil.startup  # noqa: F401  # first: the imports below take seconds
from dcil.criteria import LAMP, OBD, OBS, Criterion, Gradient, Magnitude, Taylor
from dcil.ema import EMA
from dcil.errors import Diverged, UserError
from dcil.granularity import NM, Filter, Granularity, Weight
from dcil.method import Method, StepContext
from dcil.methods import (
    ACDC,
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
    SRSTE,
    ST3,
    AutoPrune,
    Dense,
    Feather,
    GraNet,
    L1Filter,
    OneShot,
    Rewind,
    RigL,
    TopKAST,
)
from dcil.net import SparseNet
from dcil.schedule import Alternating, AtSteps, Constant, Cubic, Never, Phase, Schedule, Timeline
from dcil.scope import ERK, Global, Scope, Uniform
from dcil.update import MaskObserver, Update

if TYPE_CHECKING:
    from dcil.engine import make_step

__version__ = "0.1.0"

__all__ = [
    "ACDC",
    "DCIL",
    "DNS",
    "DPF",
    "DSR",
    "EMA",
    "ERK",
    "FPGM",
    "GMP",
    "LAMP",
    "METHODS",
    "MIL",
    "NM",
    "OBD",
    "OBS",
    "SET",
    "SFP",
    "SM",
    "SRSTE",
    "ST3",
    "Alternating",
    "AtSteps",
    "AutoPrune",
    "Constant",
    "Criterion",
    "Cubic",
    "Dense",
    "Diverged",
    "Feather",
    "Filter",
    "Global",
    "GraNet",
    "Gradient",
    "Granularity",
    "L1Filter",
    "Magnitude",
    "MaskObserver",
    "Method",
    "Never",
    "OneShot",
    "Phase",
    "Rewind",
    "RigL",
    "Schedule",
    "Scope",
    "SparseNet",
    "StepContext",
    "Taylor",
    "Timeline",
    "TopKAST",
    "Uniform",
    "Update",
    "UserError",
    "Weight",
    "make_step",
]


def __getattr__(name: str) -> object:
    if name == "make_step":  # the engine stands behind the kernel, and needs more than torch
        from dcil.engine import make_step

        return make_step
    if name == "Moment":  # renamed after 0.1; removed in 0.3 (docs/policy.md)
        warnings.warn("dcil.Moment is now dcil.StepContext", DeprecationWarning, stacklevel=2)
        return StepContext
    raise AttributeError(f"module 'dcil' has no attribute {name!r}")
