"""A finished network as a file for somebody else, checked before it gets its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dcil.errors import UserError, unknown
from dcil.train.files import write_whole

State = dict[str, Tensor]


def write_safetensors(state: State, file: Path, notes: dict[str, str]) -> None:
    save_file(state, file, notes)


def write_torch(state: State, file: Path, notes: dict[str, str]) -> None:
    torch.save(state, file)


def read_torch(file: Path) -> State:
    state: State = torch.load(file, weights_only=True)
    return state


#: Format -> how it is written and read back.
FORMATS: dict[str, tuple[Callable[[State, Path, dict[str, str]], None], Callable[[Path], State]]] = {
    "safetensors": (write_safetensors, load_file),
    "torch": (write_torch, read_torch),
}


def export(model: nn.Module, to: str, out: Path, notes: dict[str, str] | None = None) -> None:
    """Write the state dict of ``model`` in the format ``to``; the file appears only if it reads back equal."""
    if to not in FORMATS:
        raise unknown("export format", to, FORMATS)
    write, read = FORMATS[to]
    # Clones, because tied weights share memory and safetensors refuses that.
    state = {key: value.detach().cpu().contiguous().clone() for key, value in model.state_dict().items()}

    def write_checked(draft: Path) -> None:
        write(state, draft, notes or {})
        back = read(draft)
        wrong = [key for key in state if key not in back or not torch.equal(state[key], back[key])]
        if wrong or len(back) != len(state):
            raise UserError(f"{out} was not written: {to} gave back something else for {wrong[:3] or 'its keys'}")

    write_whole(out, write_checked)
