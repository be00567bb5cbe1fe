"""Identity: a few numbers in every state dict by which the training it belongs to is recognised."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, replace
from typing import Any

import torch
from torch import Tensor

from dcil.errors import UserError, described
from dcil.method import Method


def pack(method: Method, steps_done: int) -> Tensor:
    """(steps done, steps, sparsity, initial sparsity, checksum of the settings) as integers.

    One tensor of a fixed size, so that the state dict fits formats that hold nothing else, and loads in place.
    """
    numbers = [steps_done, method.steps, _bits(method.sparsity), _bits(method.initial_sparsity), checksum(method)]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def unpack(state: Tensor, method: Method) -> tuple[Method, int]:
    """The method to go on with and the steps done; a state dict of another training is refused."""
    whole = isinstance(state, Tensor) and not state.is_floating_point() and not state.is_complex()
    if not whole or state.shape not in ((), (5,)) or int(state.flatten()[0]) < 0:
        got = f"{state.dtype} of shape {tuple(state.shape)}" if isinstance(state, Tensor) else described(state)
        raise UserError(
            f"_extra_state must be what net.state_dict() wrote (the steps done and the settings), got {got}"
        )
    if state.dim() == 0:  # of a version before 0.2: the steps alone
        return method, int(state)
    steps_done, steps, sparsity, initial, check = (int(number) for number in state)
    if check != checksum(method):
        raise UserError(
            f"the state dict must come from the same training, got one with sparsity {_number(sparsity):g} over "
            f"{steps} steps, or other settings, for {method.sparsity:g} over {method.steps}: build SparseNet with "
            "those settings, or take over the weights alone with net.load_model(model_state_dict)"
        )
    return replace(method, initial_sparsity=_number(initial)), steps_done


class StateError(UserError, RuntimeError):
    """A state dict that does not fit; also a RuntimeError, as torch raises it."""


def check(state_dict: Mapping[str, Any], prefix: str, method: Method) -> None:
    """Refuse a state dict of another training, and masks that are none, such as an average of them."""
    if (state := state_dict.get(f"{prefix}_extra_state")) is not None:
        unpack(state, method)
    for name, mask in state_dict.items():
        if name.startswith(f"{prefix}_masks.") and isinstance(mask, Tensor) and mask.is_floating_point():
            raise StateError(
                f"{name} must be a bool tensor (True = kept), got {mask.dtype}: an average of masks is none"
            )


def checksum(method: Method) -> int:
    """Of the settings that differ from their (first) defaults: a later version may add settings, or change defaults.

    Without the initial sparsity, which masks given to SparseNet may raise.
    """
    changed = [
        f"{field.name}={_written(getattr(method, field.name))}"
        for field in fields(method)
        if field.name != "initial_sparsity" and getattr(method, field.name) != _default(field)
    ]
    return zlib.crc32(f"{type(method).__name__}({', '.join(changed)})".encode())


def _default(field: Field[Any]) -> Any:
    return field.metadata.get("before", field.default if field.default is not MISSING else None)


def _written(value: Any) -> str:
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))  # another process has other addresses


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
