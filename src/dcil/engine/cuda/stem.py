"""The stem of a network whose paths run on streams: the layers before the first branch, computed for all paths at once.

The paths see the same images, so one convolution with the filters of all of them reads the images once; the norm, the
ReLU and the pooling that follow compute at that width. After the stem each path goes its own way.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from dcil.engine.cuda.flat import view_at
from dcil.engine.cuda.ops import Conv, Norm, Pool, SideStream, flattened
from dcil.engine.cuda.rewrite import Program


class Stem:
    """The first layers of several programs.

    convs   the convolution of every program: where each has its weights and wants their gradient
    layers  what computes for all of them, the convolution first
    """

    def __init__(self, convs: Sequence[Conv], layers: Sequence[nn.Module], device: torch.device) -> None:
        self.convs = convs
        self.conv = side_by_side(convs, SideStream(device, enabled=False))
        self.norms = [layer for layer in layers if isinstance(layer, Norm)]
        self.run = nn.Sequential(self.conv, *layers)

    def load(self) -> None:
        """Copy the weights of the programs, which are final."""
        torch.cat([flattened(conv.value) for conv in self.convs], out=flattened(self.conv.value))

    def __call__(self, x: Tensor | None, track: bool) -> tuple[Tensor, ...]:
        """Return the features of each program."""
        for norm in self.norms:
            norm.track = track
        features: Tensor = self.run(x)
        return features.chunk(len(self.convs), 1)

    def collect(self) -> None:
        """Hand out the gradients; those of a path outside of the loss are 0."""
        if self.conv.side_stream.join():
            parts = flattened(self.conv.gradient).chunk(len(self.convs))
            torch._foreach_copy_([flattened(conv.gradient) for conv in self.convs], parts)


def take_stem(programs: Sequence[Program], device: torch.device) -> Stem | None:
    """Move the stem out of the programs, which read its features then; None if they have none that can be moved."""
    runs = [program.run for program in programs]
    nodes = [stem_nodes(run) for run in runs]
    parts = [[run.get_submodule(str(node.target)) for node in own] for run, own in zip(runs, nodes, strict=True)]
    convs, *others = zip(*parts, strict=True) if all(nodes) else ((),)
    layers = [wide_norm(layer) if isinstance(layer[0], Norm) else layer[0] for layer in others]
    if not convs or None in layers:
        return None
    for run, own in zip(runs, nodes, strict=True):
        remove(run, own)
    return Stem(convs, [layer for layer in layers if layer is not None], device)


def stem_nodes(run: fx.GraphModule) -> list[fx.Node]:
    """Return the layers before the first branch: a convolution of the images, then norm and pooling.

    None if there is the convolution alone, which saves less than it costs to divide what it returns, or no other after
    it: by its convolutions a program knows that the loss depends on it.
    """
    (node,) = run.graph.find_nodes(op="placeholder")
    found: list[fx.Node] = []
    while len(node.users) == 1:
        (node,) = node.users
        part = run.get_submodule(str(node.target)) if node.op == "call_module" else None
        plain_norm = isinstance(part, Norm) and part.outputs == 1 and len(node.args) == 1
        if not (isinstance(part, Pool) or plain_norm if found else isinstance(part, Conv) and part.how[-1] == 1):
            break
        found.append(node)
    others = sum(isinstance(part, Conv) for part in run.modules()) - 1
    return found if len(found) > 1 and others else []


def remove(run: fx.GraphModule, stem: Sequence[fx.Node]) -> None:
    """Let a program read its part of the features, which it lays out for its convolutions on its own stream."""
    with run.graph.inserting_after(stem[-1]):
        part = run.graph.call_method("contiguous", (stem[0].args[0],), {"memory_format": torch.channels_last})
    stem[-1].replace_all_uses_with(part)
    for node in reversed(stem):
        run.graph.erase_node(node)
    run.recompile()


def side_by_side(convs: Sequence[Conv], side_stream: SideStream) -> Conv:
    """Return the convolution with the filters of all."""
    like = convs[0].value
    shape = (len(convs) * like.shape[0], *like.shape[1:])
    wide = copy.copy(convs[0])
    wide.value, wide.gradient = (view_at(like.new_zeros(torch.Size(shape).numel()), 0, shape) for _ in range(2))
    wide.side_stream = side_stream
    return wide


def wide_norm(norms: Sequence[Norm]) -> Norm | None:
    """Return the norm of the channels of all, in the same memory; None if they are not neighbours there."""
    wide = copy.copy(norms[0])
    kinds = [(n.weight, n.bias, n.dweight, n.dbias, *n.running) for n in norms]
    found = [neighbours(vectors) for vectors in zip(*kinds, strict=True)]
    whole = [vector for vector in found if vector is not None]
    if len(whole) < len(found):
        return None
    wide.weight, wide.bias, wide.dweight, wide.dbias, *running = whole
    wide.running = running[0], running[1]
    return wide


def neighbours(vectors: Sequence[Tensor]) -> Tensor | None:
    """Return vectors that follow each other in memory as one."""
    size, places = vectors[0].numel(), [vector.storage_offset() for vector in vectors]
    if any(b - a != size for a, b in itertools.pairwise(places)):
        return None
    return vectors[0].as_strided((size * len(vectors),), (1,))
