"""Export state dicts under the network's own keys, zeros in place: torch's own format, and safetensors.

Both libraries have errors of their own for a disk that is full or closed; Python's, which say what it was, come from
writing their bytes oneself.
"""

from __future__ import annotations

import io
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

State = dict[str, Tensor]


def write_safetensors(state: State, file: Path, notes: dict[str, str]) -> None:
    file.write_bytes(save(state, notes))


def write_torch(state: State, file: Path, notes: dict[str, str]) -> None:
    whole = io.BytesIO()
    torch.save(state, whole)
    file.write_bytes(whole.getbuffer())


def read_torch(file: Path) -> State:
    state: State = torch.load(file, weights_only=True)
    return state
