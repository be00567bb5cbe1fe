"""Export state dicts under the network's own keys, zeros in place: torch's own format, and safetensors.

Both libraries have errors of their own for a disk that is full or closed; Python's, which say what it was, come from
writing their bytes oneself.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from dcil.runs.damage import CONTENT_ERRORS, naming_file

State = dict[str, Tensor]
#: What torch raises when a file was altered or cut short.
ERRORS = (pickle.UnpicklingError, RuntimeError, EOFError, AttributeError, AssertionError, *CONTENT_ERRORS)


def write_safetensors(state: State, file: Path, notes: dict[str, str]) -> None:
    file.write_bytes(save(state, notes))


def write_torch(state: State, file: Path, notes: dict[str, str]) -> None:
    whole = io.BytesIO()
    torch.save(state, whole)
    file.write_bytes(whole.getbuffer())


def read_torch(file: Path) -> State:
    """Read a state dict in torch's own format; no code in it is run."""
    with naming_file(file, "export it again", ERRORS):
        state = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
            raise ValueError("not a state dict")
        return state
