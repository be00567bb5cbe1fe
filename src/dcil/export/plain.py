"""State dicts under the network's own keys, zeros in place: torch's own file, and safetensors."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

State = dict[str, Tensor]


def write_safetensors(state: State, file: Path, notes: dict[str, str]) -> None:
    save_file(state, file, notes)


def write_torch(state: State, file: Path, notes: dict[str, str]) -> None:
    torch.save(state, file)


def read_torch(file: Path) -> State:
    state: State = torch.load(file, weights_only=True)
    return state
