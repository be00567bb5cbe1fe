"""Tensors in files: written atomically, recognised by their SHA-256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from dcil.runs.atomic import write_atomically


def write_tensors(file: Path, tensors: Mapping[str, Tensor], notes: dict[str, str] | None = None) -> None:
    """Write a safetensors file atomically.

    The library's own ``save_file`` leaves temporary files of its own when it is killed, and its errors do not say what
    the operating system said.
    """
    data = save(dict(tensors), notes)
    write_atomically(file, lambda draft: draft.write_bytes(data))


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU: tied weights share memory, which the format does not allow."""
    return {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}


def digest(tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> str:
    """Return the SHA-256 of names, types, shapes and values of the tensors, and of the notes."""
    found = hashlib.sha256(json.dumps(sorted(notes.items())).encode())
    for key in sorted(tensors):
        tensor = tensors[key]
        found.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else b"")
    return found.hexdigest()
