"""Read exported files as a user does, to bytes that can be compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from dcil.export import read_semi, read_sparse, read_torch


def tensors_of(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {key: (str(value.dtype), value.shape, value.numpy().tobytes()) for key, value in state.items()}


def plan_of(file: Path) -> list[Any]:
    """Run the plan, and return what is in it: its output depends on the kernels that tuning chose."""
    import dcil_runtime

    plan = dcil_runtime.load(file, tune_seconds=0.0)
    plan(np.zeros((1, *plan.input_shape), np.float32))
    network = dcil_runtime.read(file)
    arrays = [{name: array.tobytes() for name, array in op.arrays.items()} for op in network.ops]
    return [network.input, *((op.kind, op.inputs, op.window, op.residual, op.act) for op in network.ops), arrays]


#: Format -> its reader.
READERS: dict[str, Callable[[Path], Any]] = {
    "safetensors": lambda file: tensors_of(load_file(file)),
    "torch": lambda file: tensors_of(read_torch(file)),
    "sparse": lambda file: tensors_of(read_sparse(file)),
    "semi-structured": lambda file: tensors_of(read_semi(file)),
    "cpu": plan_of,
}
#: Formats with a checksum: no change of the file may pass.
CHECKED = ("sparse", "semi-structured", "cpu")
