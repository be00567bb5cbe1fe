"""Store all parameters of a network in one flat tensor, likewise gradients, momentum and masks, so that one kernel
updates them all. The network's own tensors become views of the flat ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcil import SparseNet

ALIGN = 8  # elements: tensor cores and cuDNN need tensors that start at multiples of 16 bytes, in bf16 too


def view_at(flat: Tensor, start: int, shape: Iterable[int]) -> Tensor:
    """Return the view of ``shape`` that begins at ``start``; four dimensions are laid out channels_last."""
    sizes = tuple(shape)
    part = flat[start : start + torch.Size(sizes).numel()]
    if len(sizes) != 4:
        return part.view(sizes)
    out, channels, height, width = sizes
    return part.view(out, height, width, channels).permute(0, 3, 1, 2)


def padded_size(tensor: Tensor, align: int = ALIGN) -> int:
    """Return the number of elements of a tensor, padding included."""
    return -(-tensor.numel() // align) * align


@dataclass
class Packed:
    """Tensors packed into ``flat``; ``starts`` maps the id of a tensor to its offset."""

    flat: Tensor
    starts: dict[int, int]

    def at(self, tensor: Tensor) -> Tensor:
        return view_at(self.flat, self.starts[id(tensor)], tensor.shape)

    def like(self, flat: Tensor, tensor: Tensor) -> Tensor:
        """Return the view of ``flat``, which has the same layout, that belongs to ``tensor``."""
        return view_at(flat, self.starts[id(tensor)], tensor.shape)


def pack(tensors: Iterable[Tensor], dtype: torch.dtype, device: torch.device, align: int) -> Packed:
    """Move the tensors into one and make each a view of it."""
    starts: dict[int, int] = {}
    size = 0
    unique = list({id(t): t for t in tensors}.values())
    for tensor in unique:
        starts[id(tensor)] = size
        size += padded_size(tensor, align)
    packed = Packed(torch.zeros(size, dtype=dtype, device=device), starts)
    for tensor in unique:
        place = packed.at(tensor)
        place.copy_(tensor.data)
        tensor.data = place
    return packed


class FlatParameters:
    """Holds the prunable weights first (``prunable_size`` elements), then the other parameters; those that the paths
    have in the same role are adjacent."""

    def __init__(self, net: SparseNet, optimizer: Optimizer, momentum: bool = True) -> None:
        self.net, self.device = net, next(net.parameters()).device
        layers = net.layers
        weights = [layer.weight for layer in layers]
        roles = roles_of(net)
        rest = [p for role in roles.values() for p in role if isinstance(p, nn.Parameter) and p.requires_grad]
        rest += [p for p in net.parameters() if p.requires_grad]
        with torch.no_grad():
            self.packed = pack([*weights, *rest], torch.float32, self.device, ALIGN)
            self.prunable_size = max(self.packed.starts[id(w)] + padded_size(w) for w in weights)
            self.masks = torch.ones(self.prunable_size, dtype=torch.bool, device=self.device)
            for layer in layers:
                place = view_at(self.masks, self.packed.starts[id(layer.weight)], layer.weight.shape)
                place.copy_(layer.mask)
                layer.mask.data = place
            live = [b for role in roles.values() for b in role if not isinstance(b, nn.Parameter)]
            self.statistics = pack([b for b in live if b.dtype == torch.float32], torch.float32, self.device, ALIGN)
            self.counters = pack([b for b in live if b.dtype == torch.int64], torch.int64, self.device, 1)
            self.gradient = torch.zeros_like(self.weights)
            held = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self.packed.starts]
            self.gradients = [(parameter, self.packed.like(self.gradient, parameter)) for parameter in held]
            self.link_gradients()
            if momentum:
                self._link_momentum(optimizer)
            else:
                lay_out_states(optimizer)
        self.leaf = self.weights.detach().requires_grad_()

    @property
    def weights(self) -> Tensor:
        return self.packed.flat

    def link_gradients(self) -> None:
        """Make ``grad`` of each parameter a view of the flat one."""
        for parameter, gradient in self.gradients:
            parameter.grad = gradient

    def _link_momentum(self, optimizer: Optimizer) -> None:
        """Make the momentum buffer of each parameter a view of a flat tensor."""
        self.momentum = torch.zeros_like(self.weights)
        for group in optimizer.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                if id(parameter) in self.packed.starts:
                    place = self.packed.like(self.momentum, parameter)
                    if (old := optimizer.state[parameter].get("momentum_buffer")) is not None:
                        place.copy_(old)
                    optimizer.state[parameter]["momentum_buffer"] = place


def lay_out_states(optimizer: Optimizer) -> None:
    """Lay out what the optimizer keeps for each parameter as the parameter itself: its fused kernels require it."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def roles_of(net: SparseNet) -> dict[str, list[Tensor]]:
    """Map each name in the model to its tensors: one for each path that has its own."""
    roles: dict[str, list[Tensor]] = {name: [p] for name, p in net.model.named_parameters()}
    roles |= {name: [b] for name, b in net.model.named_buffers()}
    for path in list(net.method.paths)[1:]:
        with torch.no_grad():
            once, again = net.tensors(path), net.tensors(path)
        for name, tensor in once.items():
            if name in roles and tensor is again[name]:  # a new tensor at each call is computed, not stored
                roles[name].append(tensor)
    for name in net.masks:
        roles.pop(name)
    return roles
