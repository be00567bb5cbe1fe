"""Execute a step on flat parameters: the network as it is with each path on its own stream, or the fused network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from dcil import SparseNet
from dcil.engine.cuda.flat import FlatParameters, padded_size, roles_of, view_at
from dcil.engine.cuda.ops import SideStream
from dcil.engine.cuda.rewrite import Program, Rewriter, traced
from dcil.engine.cuda.weights import collect_gradient, gradient_of, viewed_weights
from dcil.engine.executor import Outputs
from dcil.engine.streams import Streams


class PlainExecutor:
    """Runs the network as it is on the flat parameters, each path on its own stream."""

    def __init__(self, net: SparseNet, flat: FlatParameters) -> None:
        self.net, self.flat, self.roles = net, flat, roles_of(net)
        self.streams = Streams(flat.device, list(net.method.paths))
        starts = flat.packed.starts
        # Piece 0 has all prunable weights, each further one a parameter.
        firsts = [0, *sorted(start for start in starts.values() if start >= flat.prunable_size)]
        self.piece_index = {start: i for i, start in enumerate(firsts)}
        self.sizes = [end - start for start, end in zip(firsts, [*firsts[1:], flat.weights.numel()], strict=True)]

    def begin(self) -> None:
        self.pieces = torch.split(self.flat.leaf, self.sizes)
        self.flat.gradient.zero_()

    def outputs(self, x: Tensor, paths: Iterable[str], track: bool = True) -> Outputs:
        found: Outputs = {}
        with self.streams.forked() as on:
            for path in paths:
                with on(path):
                    found[path] = self.net.call(self.tensors(path, track), x)
        return found

    def tensors(self, path: str, track: bool) -> dict[str, Tensor]:
        """Return what ``SparseNet.tensors`` does, as views of the flat parameters."""
        index = list(self.net.method.paths).index(path)
        values = viewed_weights(self.net, self.flat, path, self.pieces[0])
        starts = self.flat.packed.starts
        found: dict[str, Tensor] = {}
        padded = [padded_size(w) for w in {id(layer.weight): layer.weight for layer in self.net.layers}.values()]
        by_start = dict(zip(torch.tensor([0, *padded]).cumsum(0).tolist(), torch.split(values, padded), strict=False))
        for layer in self.net.layers:
            found[layer.name] = view_at(by_start[starts[id(layer.weight)]], 0, layer.weight.shape)
        for name, role in self.roles.items():
            own = len(role) == len(self.net.method.paths)
            tensor = role[index] if own else role[0]
            if isinstance(tensor, nn.Parameter):
                piece = self.piece(tensor)
                found[name] = piece if own or index == 0 else piece.detach()
            else:
                found[name] = tensor if track and (own or index == 0) else tensor.clone()
        return found

    def piece(self, parameter: nn.Parameter) -> Tensor:
        start = self.flat.packed.starts.get(id(parameter))
        return parameter if start is None else view_at(self.pieces[self.piece_index[start]], 0, parameter.shape)

    def backward(self, loss: Tensor) -> None:
        self.flat.gradient.add_(gradient_of([loss], self.flat.leaf, self.net, None))

    def finish(self) -> None:
        self.pieces = ()


class FusedExecutor:
    """Runs fused programs, one per stream: all paths stacked in one program, or one program for each."""

    def __init__(
        self,
        net: SparseNet,
        flat: FlatParameters,
        dtype: torch.dtype,
        groups: Sequence[tuple[str, ...]],
        side_streams: bool,
        serial: bool,
        x: Tensor,
    ) -> None:
        self.flat = flat
        model = traced(net.model, x)
        self.side_streams = {group: SideStream(flat.device, side_streams) for group in groups}
        self.programs: dict[tuple[str, ...], Program] = {
            group: Rewriter(net, model, flat, group, dtype, self.side_streams[group]).build() for group in groups
        }
        # Memory freed on one stream is not reused on another: holding one path at a time needs a single stream.
        self.streams = Streams(flat.device, groups[:1] if serial else groups)

    def begin(self) -> None:
        with self.streams.forked() as on:
            for group, program in self.programs.items():
                with on(group):
                    program.weights.load()

    def outputs(self, x: Tensor, paths: Iterable[str], track: bool = True) -> Outputs:
        wanted, found = set(paths), Outputs()
        with self.streams.forked() as on:
            for group, program in self.programs.items():
                if wanted & set(group):
                    with on(group):
                        found |= program(x, track)
        return found

    @property
    def evaluates(self) -> bool:
        """Return True if the programs have the same graph in training and in evaluation."""
        return all(program.same_in_evaluation for program in self.programs.values())

    def evaluate(self, x: Tensor) -> Outputs:
        """Return the outputs of all paths, computed with the running statistics."""
        self.begin()
        for program in self.programs.values():
            program.run.eval()
        found = self.outputs(x, {path for group in self.programs for path in group})
        for program in self.programs.values():
            program.run.train()
        return found

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        with self.streams.forked() as on:
            for group, program in self.programs.items():
                with on(group):
                    if not self.side_streams[group].join():
                        program.zero_gradients()  # the loss did not depend on it
                    program.head.collect()
                    program.weights.collect_unprunable()
        collect_gradient([program.weights for program in self.programs.values()], self.flat)
        self.flat.counters.flat.add_(1)
