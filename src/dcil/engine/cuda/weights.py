"""What the convolutions compute with: the method's views of the weights, in the precision of the arithmetic, in memory
that stays where it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dcil import Method, SparseNet, views
from dcil.engine import kernels
from dcil.engine.cuda.flat import Flat, room, window
from dcil.weight import PrunableWeight

#: Views that treat every weight alike: the whole network's weights can go through them at once.
ELEMENTWISE = (views.kept, views.revived, views.straight_through, views.whole)


def seen(net: SparseNet, flat: Flat, path: str, head: Tensor) -> Tensor:
    """The prunable weights, laid out flat, as ``path`` sees them; differentiable."""
    if elementwise(net.method, path):
        return net.method.paths[path](head, flat.masks)
    pieces: list[Tensor] = []
    layers = list({id(layer.weight): layer for layer in net.layers}.values())
    for layer, piece in zip(layers, torch.split(head, [room(layer.weight) for layer in layers]), strict=True):
        weight = window(piece, 0, layer.weight.shape)  # one by one, as the method is written
        stand_in = PrunableWeight(layer.name, weight, layer.mask, layer.transposed, layer.conv_groups)  # type: ignore[arg-type]
        values = net.method.view(path, stand_in, net.state)
        values = values.permute(0, 2, 3, 1) if values.dim() == 4 else values
        pieces += [values.reshape(-1), piece[layer.weight.numel() :].detach()]
    return torch.cat(pieces)


def elementwise(method: Method, path: str) -> bool:
    """Whether the path's view treats every weight alike, as the method declares it."""
    return method.view_key(path) in ELEMENTWISE


def gradient_of(outputs: Sequence[Tensor], leaf: Tensor, net: SparseNet, back: Sequence[Tensor] | None) -> Tensor:
    """The gradient for ``leaf``; what a method learns besides the weights gets its own as ``grad``."""
    learned = [tensor for tensor in net.state.values() if tensor.requires_grad]
    found, *others = torch.autograd.grad(outputs, [leaf, *learned], back, allow_unused=bool(learned))
    for tensor, gradient in zip(learned, others, strict=True):
        if gradient is not None:
            tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient
    return found


class Weights:
    """The weights of one path, or of several stacked: block-diagonal, the paths' blocks one after the other.

    First every convolution finds its ``place``, then memory is allocated; ``load`` fills it, ``gradient`` reads
    the gradients that were left in its twin.
    """

    values: Tensor
    gradients: Tensor

    def __init__(self, net: SparseNet, flat: Flat, paths: Sequence[str], dtype: torch.dtype) -> None:
        self.net, self.flat, self.paths, self.dtype = net, flat, tuple(paths), dtype
        self.layers = {layer.name: layer for layer in net.layers}
        on_cuda = kernels.AVAILABLE and flat.device.type == "cuda" and len(net.method.paths) <= 2
        self.fast = on_cuda and all(elementwise(net.method, path) for path in net.method.paths)
        self.places: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.others: list[tuple[str, Tensor, bool]] = []  # weights that are not prunable: every path reads them
        self.alone = len(paths) == 1  # then the weights lie as they do in the parameters
        self.size = flat.head if self.alone else 8  # stacked: the first element is where the gaps between weights go
        self.leaf = flat.weights[: flat.head].detach().requires_grad_()
        self.index = torch.zeros(0 if self.alone else len(paths), flat.head, dtype=torch.long)

    def place(self, name: str, first: bool) -> None:
        """Reserve room. What reads the images (``first``) reads the same ones on every path."""
        weight, n, start = self.net.model.get_parameter(name), len(self.paths), self.size
        out, channels, height, width = (*weight.shape, 1, 1)[:4]
        wide = channels if first or weight.dim() == 2 else n * channels  # a classifier's blocks stay apart
        shape = (n, out, channels) if weight.dim() == 2 else (n * out, wide, height, width)
        here = self.flat.packed.starts[id(weight)]
        if self.alone and name in self.layers:
            self.places[name] = here, shape
            return
        self.places[name] = start, shape
        self.size += -(-torch.Size(shape).numel() // 8) * 8
        if name not in self.layers:
            self.others.append((name, weight, first))
            return
        o, y, x, c = torch.meshgrid(*(torch.arange(k) for k in (out, height, width, channels)), indexing="ij")
        for p in range(n):
            column = c if wide == channels else c + p * channels
            at = start + (((o + p * out) * height + y) * width + x) * wide + column
            self.index[p, here : here + weight.numel()] = at.reshape(-1)

    def allocate(self) -> None:
        self.values = torch.zeros(self.size, dtype=self.dtype, device=self.flat.device)
        self.gradients = torch.zeros_like(self.values)
        self.index = self.index.to(self.flat.device)

    def at(self, name: str) -> tuple[Tensor, Tensor]:
        """The memory of a weight and of its gradient."""
        start, shape = self.places[name]
        return window(self.values, start, shape), window(self.gradients, start, shape)

    def load(self) -> None:
        """The views of the weights as they are now."""
        if self.fast:
            for path, index in zip(self.paths, self.indices(), strict=True):
                kernels.views.write_view(
                    self.net.method.paths[path], self.flat.weights, self.flat.masks, index, self.values
                )
        else:
            self.views = [seen(self.net, self.flat, path, self.leaf) for path in self.paths]
            self.put(self.views)
        with torch.no_grad():
            for name, weight, first in self.others:
                for p in range(len(self.paths)):
                    block(self.at(name)[0], weight, first, p).copy_(weight)

    @torch.no_grad()
    def put(self, views: Sequence[Tensor]) -> None:
        if self.alone:
            self.values[: self.flat.head].copy_(views[0])
        else:
            for view, index in zip(views, self.index, strict=True):
                self.values.scatter_(0, index, view.to(self.dtype))

    def indices(self) -> list[Tensor | None]:
        return [None] if self.alone else list(self.index)

    def gradient(self) -> Tensor:
        """What the gradients of the views are for the weights themselves, by autograd."""
        parts = [self.gradients[: self.flat.head]] if self.alone else [self.gradients[index] for index in self.index]
        back = [part.float() for part in parts]
        found = gradient_of(self.views, self.leaf, self.net, back)
        self.views.clear()
        return found

    def collect_others(self) -> None:
        """Hand over the gradients of what is not prunable; only the first path changes that."""
        if self.paths[0] == next(iter(self.net.method.paths)):
            for name, weight, first in self.others:
                place = self.flat.packed.like(self.flat.gradient, weight)
                place.copy_(block(self.at(name)[1], weight, first, 0))


@torch.no_grad()
def collect(groups: Sequence[Weights], flat: Flat) -> None:
    """The gradient of the prunable weights: the sum of what every path has for them."""
    gradient = flat.gradient[: flat.head]
    shares = [
        (weights.net.method.paths[path], weights.gradients, index)
        for weights in groups
        for path, index in zip(weights.paths, weights.indices(), strict=True)
    ]
    if groups[0].fast:
        kernels.views.weight_gradient(shares, flat.masks, gradient)
        return
    with torch.enable_grad():
        found = [weights.gradient() for weights in groups]
    gradient.copy_(found[0]) if len(found) == 1 else torch.add(*found[:2], out=gradient)
    for further in found[2:]:
        gradient.add_(further)


def block(whole: Tensor, weight: Tensor, first: bool, p: int) -> Tensor:
    """The part of a stacked weight that belongs to path number ``p``."""
    out, channels = weight.shape[:2]
    rows = whole[p * out : (p + 1) * out]
    return rows if first else rows[:, p * channels : (p + 1) * channels]
