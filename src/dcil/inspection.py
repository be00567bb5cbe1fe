"""Inspection: what of a network is prunable, and what a reader of the result should know."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from dcil.method import Method
from dcil.partition import packed_weights
from dcil.sharding import count_true
from dcil.weight import PrunableWeight

UNKNOWN = "unknown layer"

#: More than this part of the connections left dense without a known reason is worth a warning.
DOUBTFUL = 0.05


@dataclass(frozen=True)
class Entry:
    """A parameter of the network and the role it has: prunable, private or dense, with the reason for the latter."""

    name: str
    shape: tuple[int, ...]
    role: str
    reason: str = ""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Summary:
    """What is prunable, private and left dense; ``str()`` is a table, ``doubts`` are guesses that may be wrong."""

    entries: Sequence[Entry]
    doubts: Sequence[str] = ()

    def share(self, role: str) -> float:
        """The part of all parameters that have this role."""
        return sum(e.size for e in self.entries if e.role == role) / max(1, sum(e.size for e in self.entries))

    def __str__(self) -> str:
        lines = []
        for role in ("prunable", "private", "dense"):
            found = [entry for entry in self.entries if entry.role == role]
            size = sum(entry.size for entry in found)
            lines.append(f"{role:<10}{size:>14,} weights {100 * self.share(role):6.2f} %")
            vectors = [entry for entry in found if len(entry.shape) < 2]
            for entry in (entry for entry in found if len(entry.shape) >= 2):
                shape = "x".join(map(str, entry.shape))
                lines.append(f"{'':<10}{entry.size:>14,}  {entry.name} ({shape}) {entry.reason}".rstrip())
            if vectors:
                lines.append(f"{'':<10}{sum(v.size for v in vectors):>14,}  in {len(vectors)} biases and norm scales")
        return "\n".join([*lines, *(f"doubtful: {doubt}" for doubt in self.doubts)])


def summarise(model: nn.Module, prunable: Collection[str], private: Mapping[str, nn.Module], chosen: bool) -> Summary:
    """List the parameters with their roles. ``chosen``: the user named the prunable weights, so nothing is doubtful."""
    own = {id(p) for module in private.values() for p in module.parameters()}
    entries, seen = [], set()
    for module_name, module in model.named_modules():
        for name, p in module.named_parameters(module_name, recurse=False):
            if id(p) in seen:  # tied: listed under its first name
                continue
            seen.add(id(p))
            role = "prunable" if name in prunable else "private" if id(p) in own else "dense"
            reason = "" if role != "dense" or p.dim() < 2 else why_dense(name, module_name, module, p, chosen)
            entries.append(Entry(name, tuple(p.shape), role, reason))
    return Summary(entries, doubts(entries))


def why_dense(name: str, module_name: str, module: nn.Module, parameter: nn.Parameter, chosen: bool) -> str:
    """The reason for which a matrix is not pruned."""
    if not parameter.requires_grad:
        return "frozen"
    if isinstance(module, nn.Embedding) or any(word in name for word in ("embed", "pos_", "token")):
        return "embedding"
    if chosen:
        return "not chosen"
    if isinstance(module, (nn.Linear, _ConvNd)) or packed_weights(module_name, module):
        return "left out by the method's settings"
    return f"{UNKNOWN} {type(module).__name__}"


def doubts(entries: Sequence[Entry]) -> list[str]:
    """What of the defaults may not be what was meant."""
    left = [entry for entry in entries if entry.reason.startswith(UNKNOWN)]
    part = sum(e.size for e in left) / max(1, sum(e.size for e in entries if len(e.shape) >= 2))
    if part <= DOUBTFUL:
        return []
    names = ", ".join(entry.name for entry in left[:3]) + (", …" if len(left) > 3 else "")
    return [
        f"{100 * part:.0f} % of the weights stay dense because their layers are not known to dcil ({names}): choose "
        "the weights to prune with prunable=['…'], or prunable=lambda name, module: True for all of them"
    ]


def find_notes(method: Method, model: nn.Module, layers: Sequence[PrunableWeight], steps_done: int) -> list[str]:
    """What a reader of the result should know (waits for the device)."""
    found = [f"layer {name} lost every weight: nothing passes it any more" for name in find_empty(layers)]
    granularity, asked = method.granularity, method.sparsity
    if misfits := [layer.name for layer in layers if not granularity.supports(layer)]:
        found.append(f"{granularity} does not fit these layers, which stay dense: {', '.join(misfits)}")
    dead, groups = count_groups(method, layers)
    if abs(dead - int(asked * groups)) > 0.005 * groups:
        hint = "" if steps_done else "; no step was counted: call net.attach(optimizer) before the training"
        found.append(f"asked for a sparsity of {asked:g}, reached {dead / max(1, groups):.4f}{hint}")
    return found + method.notes(model)


def count_groups(method: Method, layers: Sequence[PrunableWeight]) -> tuple[int, int]:
    """How many of the groups that the method prunes (weights, filters) are pruned, and how many there are."""
    pairs = [method.granularity.count_pruned(layer) for layer in layers if method.granularity.supports(layer)]
    return sum(dead for dead, _ in pairs), sum(groups for _, groups in pairs)


def find_empty(layers: Sequence[PrunableWeight]) -> list[str]:
    """The names of layers that lost every weight (waits for the device)."""
    counts = count_true([layer.mask for layer in layers]).tolist()
    return [layer.name for layer, kept in zip(layers, counts, strict=True) if not kept]


def measure(
    step: int, masks: Mapping[str, Tensor], counts: Tensor, parts: Mapping[str, Tensor | float], flips: Tensor | None
) -> dict[str, float]:
    """The metrics of a training as a flat dict, read from the device at once; ``counts`` are those of kept weights."""
    kept = dict(zip(masks, counts, strict=True))
    values = {name: part for name, part in parts.items() if isinstance(part, Tensor)}
    device = counts.device
    found = dict(zip((*kept, *values), read(*kept.values(), *values.values(), device=device), strict=True))
    sizes = {name: mask.numel() for name, mask in masks.items()}
    result: dict[str, float] = {"step": step}
    result |= {name: float(found[name]) if name in values else float(part) for name, part in parts.items()}
    result["sparsity"] = 1 - sum(found[name] for name in kept) / sum(sizes.values())
    if flips is not None:
        revived, dropped = flips.tolist()
        result |= {"flips/revived": float(revived), "flips/dropped": float(dropped)}
    return result | {f"layer_sparsity/{name}": 1 - found[name] / size for name, size in sizes.items()}


def read(*tensors: Tensor, device: torch.device) -> list[float]:
    """The values of scalar tensors, in one wait; in double where the device has it, so that counts stay exact."""
    wide = torch.float if device.type == "mps" else torch.double
    values: list[float] = torch.stack([tensor.detach().to(device, wide) for tensor in tensors]).tolist()
    return values
