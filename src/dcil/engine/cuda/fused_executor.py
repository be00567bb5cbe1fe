"""Execute the fused network on flat parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dcil import SparseNet
from dcil.engine.cuda.flat import FlatParameters
from dcil.engine.cuda.ops import SideStream
from dcil.engine.cuda.rewrite import Program, Rewriter, TracedModel
from dcil.engine.cuda.weights import collect_gradient
from dcil.engine.executor import Gradients, Inputs, Outputs
from dcil.engine.streams import Streams


class FusedExecutor:
    """Runs fused programs, one per stream: one program for each path, or all paths stacked in one, if all compute the
    same share of the batch."""

    def __init__(
        self,
        net: SparseNet,
        flat: FlatParameters,
        dtype: torch.dtype,
        groups: Sequence[tuple[str, ...]],
        side_streams: bool,
        serial: bool,
        model: TracedModel,
    ) -> None:
        self.flat = flat
        self.shares = {group: net.method.share(group[0]) for group in groups}
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

    def outputs(self, inputs: Inputs, paths: Iterable[str], track: bool = True) -> Outputs:
        wanted, found = set(paths), Outputs()
        with self.streams.forked() as on:
            for group, program in self.programs.items():
                if wanted & set(group):
                    x = inputs.first(self.shares[group]).only
                    assert x is not None
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
        found = Outputs()
        with self.streams.forked() as on:
            for group, program in self.programs.items():
                program.run.eval()
                with on(group):
                    found |= program(x)
                program.run.train()
        return found

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def finish(self) -> Gradients:
        with self.streams.forked() as on:
            for group, program in self.programs.items():
                with on(group):
                    if not self.side_streams[group].join():
                        program.zero_gradients()  # the loss did not depend on it
                    program.head.collect()
                    program.weights.collect_unprunable()
        collect_gradient([program.weights for program in self.programs.values()], self.flat)
        self.flat.counters.flat.add_(1)
        self.flat.link_gradients()
        return {self.flat.weights: self.flat.gradient}
