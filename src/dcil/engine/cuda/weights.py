"""Write the method's views of the weights to fixed memory, in the precision of the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dcil import Method, SparseNet, views
from dcil.engine import kernels
from dcil.engine.cuda.flat import FlatParameters, padded_size, view_at
from dcil.weight import PrunableWeight

#: Elementwise views: one call computes them for the flat weights of the whole network.
ELEMENTWISE = (views.kept, views.revived, views.straight_through, views.whole)


def viewed_weights(net: SparseNet, flat: FlatParameters, path: str, weights: Tensor) -> Tensor:
    """Compute the view that ``path`` has of the flat prunable ``weights``; differentiable."""
    if is_elementwise(net.method, path):
        return net.method.paths[path](weights, flat.masks)
    pieces: list[Tensor] = []
    layers = list({id(layer.weight): layer for layer in net.layers}.values())
    for layer, piece in zip(layers, torch.split(weights, [padded_size(layer.weight) for layer in layers]), strict=True):
        weight = view_at(piece, 0, layer.weight.shape)
        stand_in = PrunableWeight(layer.name, weight, layer.mask, layer.transposed, layer.conv_groups)  # type: ignore[arg-type]
        values = net.method.view(path, stand_in, net.state)
        values = values.permute(0, 2, 3, 1) if values.dim() == 4 else values
        pieces += [values.reshape(-1), piece[layer.weight.numel() :].detach()]
    return torch.cat(pieces)


def is_elementwise(method: Method, path: str) -> bool:
    """Return whether the method declares an elementwise view for the path."""
    return method.view_key(path) in ELEMENTWISE


def gradient_of(outputs: Sequence[Tensor], leaf: Tensor, net: SparseNet, back: Sequence[Tensor] | None) -> Tensor:
    """Return the gradient for ``leaf``; add those of tensors that the method learns to their ``grad``."""
    learned = [tensor for tensor in net.state.values() if tensor.requires_grad]
    found, *others = torch.autograd.grad(outputs, [leaf, *learned], back, allow_unused=bool(learned))
    for tensor, gradient in zip(learned, others, strict=True):
        if gradient is not None:
            tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient
    return found


class PathWeights:
    """Holds the weights of one path, or of several stacked: block-diagonal, one block for each path.

    Call ``reserve`` for every layer, then ``allocate``. Each step, ``load`` writes ``values``; the backward pass
    writes ``gradients``, which has the same layout.
    """

    values: Tensor
    gradients: Tensor

    def __init__(self, net: SparseNet, flat: FlatParameters, paths: Sequence[str], dtype: torch.dtype) -> None:
        self.net, self.flat, self.paths, self.dtype = net, flat, tuple(paths), dtype
        self.layers = {layer.name: layer for layer in net.layers}
        on_cuda = kernels.AVAILABLE and flat.device.type == "cuda" and len(net.method.paths) <= 2
        self.fast = on_cuda and all(is_elementwise(net.method, path) for path in net.method.paths)
        self.places: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.unprunable: list[tuple[str, Tensor, bool]] = []  # name, weight, first: shared by all paths
        self.single_path = len(paths) == 1  # then the layout is that of the parameters
        self.size = flat.prunable_size if self.single_path else 8  # stacked: element 0 takes the padding of all weights
        self.leaf = flat.weights[: flat.prunable_size].detach().requires_grad_()
        self.index = torch.zeros(0 if self.single_path else len(paths), flat.prunable_size, dtype=torch.long)

    def reserve(self, name: str, first: bool) -> None:
        """Reserve memory for a weight; the layer that reads the images (``first``) has one input for all paths."""
        weight, n, start = self.net.model.get_parameter(name), len(self.paths), self.size
        out, channels, height, width = (*weight.shape, 1, 1)[:4]
        wide = channels if first or weight.dim() == 2 else n * channels  # a classifier's blocks stay apart
        shape = (n, out, channels) if weight.dim() == 2 else (n * out, wide, height, width)
        here = self.flat.packed.starts[id(weight)]
        if self.single_path and name in self.layers:
            self.places[name] = here, shape
            return
        self.places[name] = start, shape
        self.size += -(-torch.Size(shape).numel() // 8) * 8
        if name not in self.layers:
            self.unprunable.append((name, weight, first))
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
        """Return the memory of a weight and of its gradient."""
        start, shape = self.places[name]
        return view_at(self.values, start, shape), view_at(self.gradients, start, shape)

    def load(self) -> None:
        """Compute the views of the current weights."""
        if self.fast:
            for path, index in zip(self.paths, self.indices(), strict=True):
                kernels.views.write_view(
                    self.net.method.paths[path], self.flat.weights, self.flat.masks, index, self.values
                )
        else:
            self.views = [viewed_weights(self.net, self.flat, path, self.leaf) for path in self.paths]
            self.write(self.views)
        with torch.no_grad():
            for name, weight, first in self.unprunable:
                for p in range(len(self.paths)):
                    block(self.at(name)[0], weight, first, p).copy_(weight)

    @torch.no_grad()
    def write(self, views: Sequence[Tensor]) -> None:
        if self.single_path:
            self.values[: self.flat.prunable_size].copy_(views[0])
        else:
            for view, index in zip(views, self.index, strict=True):
                self.values.scatter_(0, index, view.to(self.dtype))

    def indices(self) -> list[Tensor | None]:
        return [None] if self.single_path else list(self.index)

    def gradient(self) -> Tensor:
        """Backpropagate the gradients of the views to the weights with autograd."""
        size = self.flat.prunable_size
        parts = [self.gradients[:size]] if self.single_path else [self.gradients[index] for index in self.index]
        back = [part.float() for part in parts]
        found = gradient_of(self.views, self.leaf, self.net, back)
        self.views.clear()
        return found

    def collect_unprunable(self) -> None:
        """Copy the gradients of weights that are not prunable; only the first path trains them."""
        if self.paths[0] == next(iter(self.net.method.paths)):
            for name, weight, first in self.unprunable:
                place = self.flat.packed.like(self.flat.gradient, weight)
                place.copy_(block(self.at(name)[1], weight, first, 0))


@torch.no_grad()
def collect_gradient(groups: Sequence[PathWeights], flat: FlatParameters) -> None:
    """Sum the gradients of all paths for the prunable weights."""
    gradient = flat.gradient[: flat.prunable_size]
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
    """Return the block of a stacked weight that belongs to path number ``p``."""
    out, channels = weight.shape[:2]
    rows = whole[p * out : (p + 1) * out]
    return rows if first else rows[:, p * channels : (p + 1) * channels]
