"""Execute the fused network on flat parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from dcil import SparseNet
from dcil.engine.cuda.flat import FlatParameters
from dcil.engine.cuda.ops import SideStream
from dcil.engine.cuda.rewrite import Program, Rewriter, TracedModel
from dcil.engine.cuda.stem import take_stem
from dcil.engine.cuda.weights import collect_gradient
from dcil.engine.executor import Gradients, Inputs, Outputs
from dcil.engine.streams import Streams


class FusedExecutor:
    """Runs fused programs, one per stream: one program for each path, or all paths stacked in one, if all compute the
    same share of the batch; then a ``stem`` before several programs may compute their first layers together."""

    def __init__(
        self,
        net: SparseNet,
        flat: FlatParameters,
        dtype: torch.dtype,
        groups: Sequence[tuple[str, ...]],
        side_streams: bool,
        serial: bool,
        model: TracedModel,
        stem: bool = False,
    ) -> None:
        self.flat, self.paths = flat, set(net.method.paths)
        self.shares = {group: net.method.share(group[0]) for group in groups}
        self.side_streams = {group: SideStream(flat.device, side_streams) for group in groups}
        self.programs: dict[tuple[str, ...], Program] = {
            group: Rewriter(net, model, flat, group, dtype, self.side_streams[group]).build() for group in groups
        }
        self.stem = take_stem(list(self.programs.values()), flat.device) if stem and len(groups) > 1 else None
        # Memory freed on one stream is not reused on another: holding one path at a time needs a single stream.
        self.streams = Streams(flat.device, groups[:1] if serial else groups)

    def begin(self) -> None:
        with self.streams.forked() as on:
            for group, program in self.programs.items():
                with on(group):
                    program.weights.load()
        if self.stem is not None:
            self.stem.load()

    def outputs(self, inputs: Inputs, paths: Iterable[str], track: bool = True) -> Outputs:
        images = {group: inputs.first(share).only for group, share in self.shares.items()}
        return self.run_programs(images, set(paths), track)

    def run_programs(self, images: Mapping[tuple[str, ...], Tensor | None], paths: set[str], track: bool) -> Outputs:
        """Return the outputs of the paths, each group of them for its own images."""
        found, seen = Outputs(), list(images.values())
        if self.stem is not None:
            seen = [*self.stem(seen[0], track)]  # the same for all
        with self.streams.forked() as on:
            for (group, program), x in zip(self.programs.items(), seen, strict=True):
                if paths & set(group):
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
        runs = [program.run for program in self.programs.values()] + ([self.stem.run] if self.stem else [])
        for run in runs:
            run.eval()
        found = self.run_programs(dict.fromkeys(self.programs, x), self.paths, track=False)
        for run in runs:
            run.train()
        return found

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def finish(self) -> Gradients:
        if self.stem is not None:
            self.stem.collect()
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
