"""A plan for the CPU runtime: kept weights only, run by dcil_runtime with numpy and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dcil.errors import UserError
from dcil.export.program import quiet
from dcil.runtime import NativeMissing, PlanError, export_plan, load


def write_cpu(model: nn.Module, example: Tensor, file: Path, notes: dict[str, str]) -> None:
    try:
        with quiet():
            export_plan(model, example, file, notes)
    except (PlanError, NativeMissing) as error:
        raise UserError(str(error)) from None


def run_cpu(file: Path, x: Tensor) -> Tensor:
    try:
        return torch.from_numpy(np.asarray(load(file)(x.numpy())))
    except (PlanError, NativeMissing) as error:
        raise UserError(str(error)) from None
