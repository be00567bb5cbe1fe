"""How the outputs of the paths and the gradient of a loss come about: through the network as it is, each path on its
own stream, or through its fused form."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dcil import SparseNet
from dcil.engine.cuda.flat import Flat, roles_of, room, window
from dcil.engine.cuda.ops import SideStream, new_stream
from dcil.engine.cuda.rewrite import Program, Rewriter, traced
from dcil.engine.cuda.weights import collect, gradient_of, seen

Outputs = dict[str, Tensor]
Loss = Callable[[Outputs, Tensor], Tensor]
Note = Callable[[Outputs, Tensor], None]


class Route(Protocol):
    def begin(self) -> None:
        """Before the first path of a step: the weights are final."""

    def outputs(self, x: Tensor, paths: Iterable[str], track: bool = True) -> Outputs:
        """What the paths make of the images; without ``track`` no running statistics move."""

    def backward(self, loss: Tensor) -> None:
        """The gradient of ``loss``, in addition to those before it in this step."""

    def finish(self) -> None:
        """After the last ``backward``: the gradient is where the optimizer looks for it."""


def all_at_once(
    route: Route, paths: Iterable[str], loss: Loss, x: Tensor, y: Tensor, note: Note = lambda outputs, loss: None
) -> tuple[Outputs, Tensor]:
    """Outputs and loss of a step, which ``note`` gets before the backward pass."""
    outputs = route.outputs(x, paths)
    value = loss(outputs, y)
    result = {path: output.detach() for path, output in outputs.items()}, value.detach()
    note(*result)
    route.backward(value)
    return result


def one_at_a_time(
    route: Route, paths: Iterable[str], loss: Loss, x: Tensor, y: Tensor, note: Note = lambda outputs, loss: None
) -> tuple[Outputs, Tensor]:
    """The same gradient with one path's activations in memory: d f(p, s) = d f(p, const) + d f(const, s).

    The price is one more forward pass of each path but the first, whose outputs the first one's loss needs.
    """
    names = list(paths)
    with torch.no_grad():
        known = {name: output for name in names[1:] for name, output in route.outputs(x, [name], track=False).items()}
    value = torch.zeros(())
    for name in names:
        known |= route.outputs(x, [name])
        value = loss({path: known[path] for path in names if path in known}, y)
        route.backward(value)
        known = {path: output.detach() for path, output in known.items()}
    note(known, value.detach())
    return known, value.detach()


class Eager:
    """The network as it is, nothing else."""

    def __init__(self, net: SparseNet) -> None:
        self.net = net

    def begin(self) -> None: ...

    def outputs(self, x: Tensor, paths: Iterable[str], track: bool = True) -> Outputs:
        if track:
            return {path: self.net.path(path, x) for path in paths}
        return {path: self.untracked(path, x) for path in paths}

    def untracked(self, path: str, x: Tensor) -> Tensor:
        tensors = self.net.tensors(path)
        buffers = {name: tensors.get(name, buffer).clone() for name, buffer in self.net.model.named_buffers()}
        out: Tensor = functional_call(self.net.model, tensors | buffers, (x,))
        return out

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def finish(self) -> None: ...


class Plain:
    """The network as it is, on flat parameters, each path on its own stream."""

    def __init__(self, net: SparseNet, flat: Flat) -> None:
        self.net, self.flat, self.roles = net, flat, roles_of(net)
        self.streams = Streams(flat.device, list(net.method.paths))
        starts = flat.packed.starts
        self.slots = {start: i for i, start in enumerate([0, *sorted(s for s in starts.values() if s >= flat.head)])}
        ends = [*list(self.slots)[1:], flat.weights.numel()]
        self.sizes = [end - start for start, end in zip(self.slots, ends, strict=True)]

    def begin(self) -> None:
        self.pieces = torch.split(self.flat.leaf, self.sizes)
        self.flat.gradient.zero_()

    def outputs(self, x: Tensor, paths: Iterable[str], track: bool = True) -> Outputs:
        found: Outputs = {}
        with self.streams.forked() as on:
            for path in paths:
                with on(path):
                    found[path] = functional_call(self.net.model, self.tensors(path, track), (x,))
        return found

    def tensors(self, path: str, track: bool) -> dict[str, Tensor]:
        """As ``SparseNet.tensors``, but out of the flat parameters."""
        place = list(self.net.method.paths).index(path)
        values = seen(self.net, self.flat, path, self.pieces[0])
        starts = self.flat.packed.starts
        found: dict[str, Tensor] = {}
        rooms = [room(w) for w in {id(layer.weight): layer.weight for layer in self.net.layers}.values()]
        by_start = dict(zip(torch.tensor([0, *rooms]).cumsum(0).tolist(), torch.split(values, rooms), strict=False))
        for layer in self.net.layers:
            found[layer.name] = window(by_start[starts[id(layer.weight)]], 0, layer.weight.shape)
        for name, role in self.roles.items():
            own = len(role) == len(self.net.method.paths)
            tensor = role[place] if own else role[0]
            if isinstance(tensor, nn.Parameter):
                piece = self.piece(tensor)
                found[name] = piece if own or place == 0 else piece.detach()
            else:
                found[name] = tensor if track and (own or place == 0) else tensor.clone()
        return found

    def piece(self, parameter: nn.Parameter) -> Tensor:
        start = self.flat.packed.starts.get(id(parameter))
        return parameter if start is None else window(self.pieces[self.slots[start]], 0, parameter.shape)

    def backward(self, loss: Tensor) -> None:
        self.flat.gradient.add_(gradient_of([loss], self.flat.leaf, self.net, None))

    def finish(self) -> None:
        self.pieces = ()


class Fused:
    """One program per stream: all paths stacked in one, or one for each."""

    def __init__(
        self,
        net: SparseNet,
        flat: Flat,
        dtype: torch.dtype,
        groups: Sequence[tuple[str, ...]],
        lanes: bool,
        serial: bool,
        x: Tensor,
    ) -> None:
        self.flat = flat
        model = traced(net.model, x)
        self.lanes = {group: SideStream(flat.device, lanes) for group in groups}
        self.programs: dict[tuple[str, ...], Program] = {
            group: Rewriter(net, model, flat, group, dtype, self.lanes[group]).build() for group in groups
        }
        # Memory that one stream frees is not for another: to hold one path at a time, all must be on the same.
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
        """Do the networks differ in evaluation by what their modules do alone?"""
        return all(program.same_in_evaluation for program in self.programs.values())

    def evaluate(self, x: Tensor) -> Outputs:
        """What the paths make of the images by their running statistics."""
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
                    if not self.lanes[group].join():
                        program.forget()  # the loss did not depend on it
                    program.head.collect()
                    program.weights.collect_others()
        collect([program.weights for program in self.programs.values()], self.flat)
        self.flat.counters.flat.add_(1)


class Streams:
    """Side by side inside one step; on the CPU one after the other."""

    def __init__(self, device: torch.device, keys: Sequence[Hashable]) -> None:
        self.streams: dict[Hashable, torch.cuda.Stream] = {}
        if device.type == "cuda":
            self.streams = {key: new_stream(device, urgent=True) for key in keys[1:]}

    @contextmanager
    def forked(self, late: bool = False) -> Iterator[Callable[[Hashable], AbstractContextManager[object]]]:
        """Gives key -> a context in which work goes to that key's stream; the current one waits for all at the end.

        The streams start from here or, ``late``, from where they are entered.
        """

        def on(key: Hashable) -> AbstractContextManager[object]:
            if key not in self.streams:
                return nullcontext()
            if late:
                self.streams[key].wait_stream(torch.cuda.current_stream())
            return torch.cuda.stream(self.streams[key])

        for stream in self.streams.values():
            stream.wait_stream(torch.cuda.current_stream())
        yield on
        for stream in self.streams.values():
            torch.cuda.current_stream().wait_stream(stream)
