"""The methods, one short file each. A new one is a file and a line in METHODS."""

from __future__ import annotations

from dcil.method import Method
from dcil.methods.acdc import ACDC
from dcil.methods.autoprune import AutoPrune
from dcil.methods.dcil import DCIL
from dcil.methods.dense import Dense
from dcil.methods.dns import DNS
from dcil.methods.dpf import DPF
from dcil.methods.dsr import DSR
from dcil.methods.feather import Feather
from dcil.methods.fpgm import FPGM
from dcil.methods.gmp import GMP
from dcil.methods.granet import GraNet
from dcil.methods.l1filter import L1Filter
from dcil.methods.mil import MIL
from dcil.methods.oneshot import OneShot
from dcil.methods.rewind import Rewind
from dcil.methods.rigl import RigL
from dcil.methods.set import SET
from dcil.methods.sfp import SFP
from dcil.methods.sm import SM
from dcil.methods.srste import SRSTE
from dcil.methods.st3 import ST3
from dcil.methods.topkast import TopKAST

METHODS: dict[str, type[Method]] = {
    "dense": Dense,
    "dpf": DPF,
    "dcil": DCIL,
    "gmp": GMP,
    "sm": SM,
    "dsr": DSR,
    "set": SET,
    "rigl": RigL,
    "sfp": SFP,
    "fpgm": FPGM,
    "dns": DNS,
    "oneshot": OneShot,
    "rewind": Rewind,
    "l1filter": L1Filter,
    "autoprune": AutoPrune,
    "mil": MIL,
    "acdc": ACDC,
    "topkast": TopKAST,
    "st3": ST3,
    "feather": Feather,
    "granet": GraNet,
    "srste": SRSTE,
}

__all__ = [
    "ACDC",
    "DCIL",
    "DNS",
    "DPF",
    "DSR",
    "FPGM",
    "GMP",
    "METHODS",
    "MIL",
    "SET",
    "SFP",
    "SM",
    "SRSTE",
    "ST3",
    "AutoPrune",
    "Dense",
    "Feather",
    "GraNet",
    "L1Filter",
    "OneShot",
    "Rewind",
    "RigL",
    "TopKAST",
]
