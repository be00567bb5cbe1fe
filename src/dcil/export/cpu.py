"""Export to the CPU runtime: a plan of kept weights, which dcil_runtime runs with numpy alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dcil.errors import UserError
from dcil.export.program import quiet
from dcil.export.verify import Inputs


def write_cpu(model: nn.Module, inputs: Inputs, file: Path, notes: dict[str, str]) -> None:
    from dcil.runtime import NativeMissing, PlanError, export_plan  # needs the extra `cpu`

    try:
        with quiet():
            export_plan(model, inputs, file, notes)
    except (PlanError, NativeMissing) as error:
        raise UserError(str(error)) from None


def run_cpu(file: Path, inputs: Inputs) -> list[Tensor]:
    from dcil.runtime import NativeMissing, PlanError, load

    try:
        # Tuning makes it faster, not other. The limits are for files from strangers; this one was just written.
        plan = load(file, tune_seconds=0, max_memory=None, max_work=None)
        # One by one: for several at once the runtime would first try which arrangement of them is the fastest.
        items = [plan(*(x[i : i + 1].numpy() for x in inputs)) for i in range(len(inputs[0]))]
        found = [item if isinstance(item, tuple) else (item,) for item in items]
        return [torch.from_numpy(np.concatenate(outputs)) for outputs in zip(*found, strict=True)]
    except (PlanError, NativeMissing) as error:
        raise UserError(str(error)) from None
