"""The export formats: how each is written and read or run, and which options go with it.

A state format holds tensors and is checked by reading them back: they must be equal. A program format holds a network
that runs by itself and is checked by running it: it must compute what the source network computes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dcil.errors import UserError, unknown
from dcil.export.cpu import run_cpu, write_cpu
from dcil.export.onnx import run_onnx, write_onnx
from dcil.export.plain import State, read_torch, write_safetensors, write_torch
from dcil.export.program import run_program, write_program
from dcil.export.semi import read_semi, write_semi
from dcil.export.sparse import read_sparse, write_sparse
from dcil.export.verify import Inputs

#: State format -> how it is written and read back.
FORMATS: dict[str, tuple[Callable[[State, Path, dict[str, str]], None], Callable[[Path], State]]] = {
    "safetensors": (write_safetensors, load_file),
    "torch": (write_torch, read_torch),
    "sparse": (write_sparse, read_sparse),
    "semi-structured": (write_semi, read_semi),
}
Write = Callable[[nn.Module, Inputs, Path, dict[str, str]], None]
#: Program format -> how it is written, how it is run, and how far its outputs may be from the source's.
PROGRAMS: dict[str, tuple[Write, Callable[[Path, Inputs], list[Tensor]], float]] = {
    "compact": (write_program, run_program, 1e-5),
    "onnx": (write_onnx, run_onnx, 1e-4),
    "cpu": (write_cpu, run_cpu, 1e-5),
}
#: Program format with a compact form -> the block of its compact networks.
BLOCKS = {"compact": 1, "onnx": 8}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def check_options(to: str, dtype: str | None, small: bool, block: int | None) -> None:
    """Refuse options that do not exist or have no effect on the format ``to``; int8 is `export_int8`'s."""
    if to not in FORMATS and to not in PROGRAMS:
        raise unknown("export format", to, [*FORMATS, *PROGRAMS])
    if dtype == "int8":
        raise UserError(f"int8 goes with cpu and needs images to calibrate on (dcil.export.export_int8), got {to}")
    if dtype is not None and dtype not in DTYPES:
        raise unknown("dtype", dtype, [*DTYPES, "int8"])
    if to in PROGRAMS and dtype not in (None, "fp32"):
        raise UserError(f"{to} is written in fp32 only, got dtype {dtype}, which goes with {', '.join(FORMATS)}")
    if small and to not in BLOCKS:
        raise UserError(f"{to} has no compact form; allowed: {', '.join(BLOCKS)}")
    if block is not None and not (small or to == "compact"):
        raise UserError(f"block applies to compact networks only, got to={to!r} (drop it or use --to compact)")
