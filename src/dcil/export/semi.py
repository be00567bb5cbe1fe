"""Write, read and run 2:4 weights: of every four neighbours at most two are kept, for a GPU's sparse tensor cores.

The file holds the two values of each group and, in two bits each, where they stand: half the values plus one bit per
weight. torch's own sparse tensors are made from it on the GPU by `to_semi_structured`, because their layout belongs to
the GPU and the torch version at hand.
"""

from __future__ import annotations

import copy
import json
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcil.errors import UserError, unknown
from dcil.export.checksum import naming, open_checked, save_checked

State = dict[str, Tensor]
FORMAT = "dcil 2:4 1"
#: Which weights of a filter are neighbours: as stored, or along the input channels at each place of the kernel.
ORDERS = ("stored", "channels")
_MARK = "/2:4"


def rows(weight: Tensor, order: str) -> Tensor:
    """Reshape to (filters, weights per filter), the four of a group next to each other."""
    return (weight if order == "stored" else weight.movedim(1, -1)).reshape(weight.shape[0], -1)


def order_of(weight: Tensor) -> str | None:
    """Return the order in which ``weight`` is 2:4, or None; a weight of zeros alone is not."""
    if weight.ndim < 2 or not weight.is_floating_point() or weight[0].numel() % 4:
        return None
    if not 0 < int(weight.count_nonzero()) <= weight.numel() // 2:
        return None
    for order in ORDERS:
        if bool(((rows(weight, order).reshape(-1, 4) != 0).sum(1) <= 2).all()):
            return order
    return None


def pack(weight: Tensor, order: str) -> tuple[Tensor, Tensor]:
    """Return values of shape (filters, half) and their positions, one byte for two groups."""
    groups = rows(weight, order).reshape(-1, 4)
    places = (groups == 0).to(torch.uint8).argsort(dim=1, stable=True)[:, :2].sort(dim=1).values
    nibbles = places[:, 0] | places[:, 1] << 2
    if len(nibbles) % 2:
        nibbles = torch.cat([nibbles, nibbles.new_zeros(1)])
    meta = (nibbles[0::2] | nibbles[1::2] << 4).to(torch.uint8)
    return groups.gather(1, places).reshape(weight.shape[0], -1), meta


def unpack(values: Tensor, meta: Tensor, shape: tuple[int, ...], order: str) -> Tensor:
    """Return the weight that `pack` packed; refuse what it would not write."""
    numel = math.prod(shape)
    groups = numel // 4
    if numel % (4 * shape[0]) or values.numel() * 2 != numel or order not in ORDERS:
        raise UserError("the values do not fit the shape")
    if meta.dtype is not torch.uint8 or tuple(meta.shape) != ((groups + 1) // 2,):
        raise UserError("the places are not two bits for each value")
    nibbles = torch.stack([meta & 15, meta >> 4], 1).flatten()
    if nibbles[groups:].any():
        raise UserError("there are bits behind the last place")
    places = torch.stack([nibbles & 3, nibbles >> 2], 1)[:groups].long()
    if not bool((places[:, 0] < places[:, 1]).all()):
        raise UserError("two values have the same place")
    flat = torch.zeros(groups, 4, dtype=values.dtype).scatter_(1, places, values.reshape(-1, 2))
    if order == "stored":
        return flat.reshape(shape)
    return flat.reshape(shape[0], *shape[2:], shape[1]).movedim(-1, 1).contiguous()


def write_semi(state: State, file: Path, notes: dict[str, str]) -> None:
    parts: State = {}
    packed: dict[str, tuple[list[int], str]] = {}
    for name, tensor in state.items():
        if order := order_of(tensor):
            parts[name], parts[name + _MARK] = pack(tensor, order)
            packed[name] = (list(tensor.shape), order)
        else:
            parts[name] = tensor
    if not packed:
        raise UserError("no layer of this network is 2:4; train with --granularity 2:4")
    save_checked(parts, file, {**notes, "format": FORMAT, "2:4": json.dumps(packed)})


def read_semi(file: Path | str) -> State:
    """Read the state dict of a semi-structured file; raise UserError if it is damaged."""
    with naming(file):
        parts, notes = open_checked(Path(file), FORMAT)
        packed = json.loads(notes["2:4"])
        if {k for k in parts if k.endswith(_MARK)} != {k + _MARK for k in packed}:
            raise UserError("it does not say which layers are 2:4")
        state: State = {}
        for name, tensor in parts.items():
            if name in packed:
                shape, order = packed[name]
                if not all(type(d) is int and d > 0 for d in shape) or len(shape) < 2:
                    raise UserError(f"{name!r} has no possible shape")
                tensor = unpack(tensor, parts[name + _MARK], tuple(shape), order)
            if not name.endswith(_MARK):
                state[name] = tensor
        return state


def load_semi(file: Path | str, model: nn.Module) -> nn.Module:
    """Load ``file`` into ``model`` and return it; zeros in place, on any device."""
    state = read_semi(file)
    own = model.state_dict()
    if wrong := [k for k in {**own, **state} if k not in own or k not in state or own[k].shape != state[k].shape]:
        raise UserError(f"{file} is of another network: {wrong[0]!r} differs")
    model.load_state_dict(state)
    return model


@dataclass(frozen=True)
class SemiStructured:
    """Hold ``model`` with torch's 2:4 tensors in the layers ``converted``; ``left`` has the reason for each other."""

    model: nn.Module
    converted: list[str]
    left: dict[str, str]


#: torch's two implementations. CUTLASS's kernels are for Ampere alone; cuSPARSELt's for it and what came after.
BACKENDS: dict[str, Any] = {
    "cusparselt": torch.sparse.SparseSemiStructuredTensorCUSPARSELT,
    "cutlass": torch.sparse.SparseSemiStructuredTensorCUTLASS,
}


class Pointwise(nn.Module):
    """Compute a 1 x 1 Conv2d as a matrix product; nothing is copied where images are channels_last."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.weight = nn.Parameter(conv.weight.detach().flatten(1), requires_grad=False)
        self.bias, self.stride = conv.bias, conv.stride

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = self.stride
        x = x[:, :, ::rows, ::columns].permute(0, 2, 3, 1).contiguous()
        return F.linear(x, self.weight, self.bias).permute(0, 3, 1, 2)


def to_semi_structured(model: nn.Module, backend: str = "cusparselt") -> SemiStructured:
    """Return a copy of a finalized ``model``, on a GPU in float16 or bfloat16, that runs on the sparse tensor cores.

    torch runs 2:4 only in matrix products, so only Linear layers and 1 x 1 convolutions are converted; whether that is
    faster depends on their size (`dcil bench infer --semi-structured` measures it).
    """
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    model = copy.deepcopy(model).eval()
    converted: list[str] = []
    left: dict[str, str] = {}
    for name, module in list(model.named_modules()):
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim < 2:
            continue
        if reason := why_not(module, weight, backend):
            left[name] = reason
            continue
        if isinstance(module, nn.Conv2d):
            module = Pointwise(module)
            model = _replaced(model, name, module)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the API is a prototype
            sparse = BACKENDS[backend].from_dense(weight.detach().flatten(1).contiguous())
        module.weight = nn.Parameter(sparse, requires_grad=False)
        converted.append(name)
    return SemiStructured(model, converted, left)


def _replaced(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    if not name:
        return module
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
    return model


def coverage(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """Return the layers that torch can run as 2:4 on a GPU in half precision, and the reason for each other one."""
    runs: list[str] = []
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or order_of(weight) is None:
            continue
        if reason := why_not(module, weight.detach().half(), device=False):
            left[name] = reason
        else:
            runs.append(name)
    return runs, left


def why_not(module: nn.Module, weight: Tensor, backend: str = "cusparselt", device: bool = True) -> str | None:
    """Return why torch cannot run this layer as 2:4, or None; without ``device``, judged by the layer alone."""
    if not isinstance(module, nn.Linear) and not _is_pointwise(module):
        size = " x ".join(map(str, weight.shape[2:]))
        return f"torch runs 2:4 in matrix products only, not in a {size + ' ' if size else ''}{type(module).__name__}"
    if order_of(weight) != "stored":
        return "its weights are not 2:4"
    if weight.dtype not in (torch.float16, torch.bfloat16):
        return f"it is {str(weight.dtype).removeprefix('torch.')}; float16 or bfloat16 is needed"
    need = BACKENDS[backend]._DTYPE_SHAPE_CONSTRAINTS[weight.dtype]
    (height, width), (by, across) = weight.shape[:2], (need.sparse_min_rows, need.sparse_min_cols)
    if height % by or width % across:
        return f"{height} x {width} weights: a multiple of {by} x {across} is needed"
    return "it is not on a GPU" if device and not weight.is_cuda else None


def _is_pointwise(module: nn.Module) -> bool:
    plain = isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) and module.groups == 1
    return plain and module.padding in ((0, 0), "valid", "same")
