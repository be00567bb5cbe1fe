"""Write and read sparse files: the kept values and coded masks, in a safetensors file.

A safetensors file with the parts
    index          zlib of a JSON list: [name, dtype, shape, kept, k, bytes of unary bits], kept = -1 for a dense tensor
    masks          the coded masks of the sparse tensors, one after the other (mask_codec.py)
    values.DTYPE   the values of all tensors of that type, in the index's order
and, in its header, the format, the caller's notes and the SHA-256 of everything else.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dcil.errors import UserError
from dcil.export import mask_codec
from dcil.export.checksum import naming, open_checked, save_checked

State = dict[str, Tensor]
FORMAT = "dcil sparse 1"
_KINDS = ["float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"]
DTYPES: dict[str, torch.dtype] = {kind: getattr(torch, kind) for kind in _KINDS}
#: Without a model to compare shapes with, a file may unfold to this many times its own size.
LARGEST_RATIO = 1000
LARGEST_INDEX = 64 << 20


@dataclass(frozen=True)
class Entry:
    """Describe a tensor of the file: a line of its index."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    kept: int  # values stored; -1: all of them, no mask
    k: int
    unary: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stored(self) -> int:
        return self.numel if self.kept < 0 else self.kept

    @property
    def mask_bytes(self) -> int:
        return 0 if self.kept < 0 else mask_codec.low_size(self.kept, self.k) + self.unary


def write_sparse(state: State, file: Path, notes: dict[str, str]) -> None:
    entries, masks, values = [], [], {}  # type: ignore[var-annotated]
    for name, tensor in state.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise UserError(f"{name} is {dtype}; a sparse file holds {', '.join(DTYPES)}")
        flat = tensor.detach().cpu().flatten()
        entry, mask, kept = _entry(name, dtype, flat, list(tensor.shape))
        entries.append(entry)
        masks += mask
        values.setdefault(f"values.{dtype}", []).append(kept)
    index = zlib.compress(json.dumps(entries, separators=(",", ":")).encode(), 9)
    parts = {key: torch.cat(list(pieces)) for key, pieces in values.items()}
    parts["masks"] = torch.from_numpy(np.concatenate([np.zeros(0, np.uint8), *masks]))
    parts["index"] = torch.frombuffer(bytearray(index), dtype=torch.uint8)
    save_checked(parts, file, {**notes, "format": FORMAT})


def _entry(name: str, dtype: str, flat: Tensor, shape: list[int]) -> tuple[list[Any], list[mask_codec.Bytes], Tensor]:
    """Return the line of the index, the mask's bytes and the values of one tensor, sparse where that is smaller."""
    mask = (flat != 0).numpy()
    if mask.size and not mask.all():
        k, kept = mask_codec.best_k(mask), int(mask.sum())
        low, unary = mask_codec.encode(mask, k)
        if len(low) + len(unary) + kept * flat.element_size() < flat.nbytes:
            return [name, dtype, shape, kept, k, len(unary)], [low, unary], flat[torch.from_numpy(mask)]
    return [name, dtype, shape, -1, 0, 0], [], flat


def load_sparse(file: Path | str, model: nn.Module) -> nn.Module:
    """Load ``file`` into ``model`` and return it; a file that does not fit changes nothing."""
    own = model.state_dict()
    state = read_sparse(file, {key: tuple(value.shape) for key, value in own.items()})
    model.load_state_dict(state)
    return model


def read_sparse(file: Path | str, shapes: dict[str, tuple[int, ...]] | None = None) -> State:
    """Read the state dict in ``file``, with ``shapes`` only if it has exactly these; damage raises UserError."""
    with naming(file):
        parts = _open(Path(file))
        entries = _index(parts.pop("index"))
        _check_sizes(entries, parts, shapes, Path(file).stat().st_size)
        return _unfold(entries, parts)


def _open(file: Path) -> State:
    """Read and check the parts of the file."""
    parts, _ = open_checked(file, FORMAT)
    allowed = {"index", "masks", *(f"values.{d}" for d in DTYPES)}
    if not {"index", "masks"} <= parts.keys() <= allowed or any(part.ndim != 1 for part in parts.values()):
        raise UserError("it has other parts")
    if parts["index"].dtype is not torch.uint8 or parts["masks"].dtype is not torch.uint8:
        raise UserError("its index or masks are not bytes")
    return parts


def _index(part: Tensor) -> list[Entry]:
    unzip = zlib.decompressobj()
    text = unzip.decompress(part.numpy().tobytes(), LARGEST_INDEX)
    if not unzip.eof or unzip.unused_data:
        raise UserError("its index does not end where it should")
    lines = json.loads(text)
    entries = [Entry(n, DTYPES[d], tuple(s), kept, k, unary) for n, d, s, kept, k, unary in lines]
    for e in entries:
        whole = all(type(i) is int for i in (*e.shape, e.kept, e.k, e.unary))
        if not whole or not isinstance(e.name, str) or len(e.shape) > 32 or any(not 0 <= d < 1 << 40 for d in e.shape):
            raise UserError("its index has a wrong name or shape")
        if not -1 <= e.kept <= e.numel or not mask_codec.PACKED <= e.k <= mask_codec.LARGEST_K or e.unary < 0:
            raise UserError(f"the counts of {e.name!r} are impossible")
    if len({e.name for e in entries}) != len(entries):
        raise UserError("its index names a tensor twice")
    return entries


def _check_sizes(entries: list[Entry], parts: State, shapes: dict[str, tuple[int, ...]] | None, size: int) -> None:
    """Check, before anything is allocated, that every byte belongs to a tensor and that the tensors are plausible."""
    if sum(e.mask_bytes for e in entries) != len(parts["masks"]):
        raise UserError("its masks do not fill their part")
    for key, dtype in DTYPES.items():
        stored = sum(e.stored for e in entries if e.dtype is dtype)
        part = parts.get(f"values.{key}")
        if stored != (0 if part is None else len(part)) or (part is not None and part.dtype is not dtype):
            raise UserError(f"its {key} values are not as many as its index says")
    if shapes is not None:
        found = {e.name: e.shape for e in entries}
        wrong = [k for k in {**shapes, **found} if found.get(k) != shapes.get(k)]
        if wrong:
            key = wrong[0]
            raise UserError(f"{key!r} has shape {found.get(key, 'none')}, the model's {shapes.get(key, 'none')}")
    elif sum(e.numel * e.dtype.itemsize for e in entries) > LARGEST_RATIO * size:
        raise UserError(f"it would unfold to more than {LARGEST_RATIO} times its size; load it into its model instead")


def _unfold(entries: list[Entry], parts: State) -> State:
    state: State = {}
    taken = dict.fromkeys(parts, 0)

    def take(key: str, count: int) -> Tensor:
        start = taken[key]
        taken[key] += count
        return parts[key][start : start + count]

    for e in entries:
        key = f"values.{str(e.dtype).removeprefix('torch.')}"
        # No part holds the values of a type of which none is kept.
        values = take(key, e.stored) if key in parts else torch.zeros(0, dtype=e.dtype)
        if e.kept < 0:
            state[e.name] = values.reshape(e.shape).clone()
            continue
        low = take("masks", e.mask_bytes - e.unary).numpy()
        positions = mask_codec.decode(low, take("masks", e.unary).numpy(), e.k, e.kept, e.numel)
        if (values == 0).any():
            raise UserError(f"{e.name!r} keeps a zero")
        whole = torch.zeros(e.numel, dtype=e.dtype)
        whole[torch.from_numpy(positions)] = values
        state[e.name] = whole.reshape(e.shape)
    return state
