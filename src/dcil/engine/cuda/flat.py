"""Every parameter of a network in one tensor, likewise gradients, momentum and masks: one kernel where there were
hundreds. The network's own tensors become windows into them, so everybody else goes on as before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dcil import SparseNet

ALIGN = 8  # elements: windows start at multiples of 16 bytes also in bf16, as the matrix units want


def window(flat: Tensor, start: int, shape: Iterable[int]) -> Tensor:
    """``shape`` at ``start``; of four dimensions the second lies innermost (channels_last)."""
    sizes = tuple(shape)
    part = flat[start : start + torch.Size(sizes).numel()]
    if len(sizes) != 4:
        return part.view(sizes)
    out, channels, height, width = sizes
    return part.view(out, height, width, channels).permute(0, 3, 1, 2)


def room(tensor: Tensor, align: int = ALIGN) -> int:
    """The elements that a tensor takes up, the gap to the next one included."""
    return -(-tensor.numel() // align) * align


@dataclass
class Packed:
    """Tensors laid one behind the other; ``starts`` by the id of the tensor."""

    flat: Tensor
    starts: dict[int, int]

    def at(self, tensor: Tensor) -> Tensor:
        return window(self.flat, self.starts[id(tensor)], tensor.shape)

    def like(self, flat: Tensor, tensor: Tensor) -> Tensor:
        """The same place in a tensor that is laid out alike."""
        return window(flat, self.starts[id(tensor)], tensor.shape)


def pack(tensors: Iterable[Tensor], dtype: torch.dtype, device: torch.device, align: int) -> Packed:
    """Move the tensors into one and make each a window into it."""
    starts: dict[int, int] = {}
    size = 0
    unique = list({id(t): t for t in tensors}.values())
    for tensor in unique:
        starts[id(tensor)] = size
        size += room(tensor, align)
    packed = Packed(torch.zeros(size, dtype=dtype, device=device), starts)
    for tensor in unique:
        place = packed.at(tensor)
        place.copy_(tensor.data)
        tensor.data = place
    return packed


class Flat:
    """The parameters: prunable weights first (``head`` elements of them), then the others, those that the paths have
    in the same role side by side."""

    def __init__(self, net: SparseNet, optimizer: torch.optim.SGD) -> None:
        self.net, self.device = net, next(net.parameters()).device
        layers = net.layers
        weights = [layer.weight for layer in layers]
        roles = roles_of(net)
        rest = [p for role in roles.values() for p in role if isinstance(p, nn.Parameter) and p.requires_grad]
        rest += [p for p in net.parameters() if p.requires_grad]
        with torch.no_grad():
            self.packed = pack([*weights, *rest], torch.float32, self.device, ALIGN)
            self.head = max(self.packed.starts[id(w)] + room(w) for w in weights)
            self.masks = torch.ones(self.head, dtype=torch.bool, device=self.device)
            for layer in layers:
                place = window(self.masks, self.packed.starts[id(layer.weight)], layer.weight.shape)
                place.copy_(layer.mask)
                layer.mask.data = place
            live = [b for role in roles.values() for b in role if not isinstance(b, nn.Parameter)]
            self.statistics = pack([b for b in live if b.dtype == torch.float32], torch.float32, self.device, 1)
            self.counters = pack([b for b in live if b.dtype == torch.int64], torch.int64, self.device, 1)
            self._adopt(optimizer)
        self.leaf = self.weights.detach().requires_grad_()

    @property
    def weights(self) -> Tensor:
        return self.packed.flat

    def _adopt(self, optimizer: torch.optim.SGD) -> None:
        """Gradients and momentum, windows for everybody who looks for them beside the parameters."""
        self.gradient, self.momentum = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) not in self.packed.starts:
                continue
            parameter.grad = self.packed.like(self.gradient, parameter)
            if not optimizer.defaults["momentum"]:
                continue
            place = self.packed.like(self.momentum, parameter)
            if (old := optimizer.state[parameter].get("momentum_buffer")) is not None:
                place.copy_(old)
            optimizer.state[parameter]["momentum_buffer"] = place


def roles_of(net: SparseNet) -> dict[str, list[Tensor]]:
    """Name in the model -> the live tensors that the paths have there, one for each path that has its own."""
    roles: dict[str, list[Tensor]] = {name: [p] for name, p in net.model.named_parameters()}
    roles |= {name: [b] for name, b in net.model.named_buffers()}
    for path in list(net.method.paths)[1:]:
        with torch.no_grad():
            once, again = net.tensors(path), net.tensors(path)
        for name, tensor in once.items():
            if name in roles and tensor is again[name]:  # made afresh at each call: not its own
                roles[name].append(tensor)
    for name in net.masks:
        roles.pop(name)
    return roles
