"""Checks: what is checked when something happens for the first time, or announced once, and not in every step."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcil.attributes import Attributes, mark
from dcil.errors import UserError, described
from dcil.sharding import count_true, is_sharded
from dcil.wiring import (
    check_gradients,
    check_layers,
    check_optimizer,
    checkpointing_refused,
    refuse_checkpoints_in,
    unwrapped,
    was_skipped,
)


class Arrival:
    """Numbers on their way to the host. On a GPU they are read when they have arrived: nothing waits for the device."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.event = values, None
        if values.is_cuda:
            self.values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(
                values, non_blocking=True
            )
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record()

    def here(self) -> bool:
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        """The values, once they have arrived."""
        if self.event is not None:
            self.event.synchronize()
        return self.values


class Weights:
    """Refuses a forward pass that changes weights: it computes with views of them, so that the change would be lost.

    Seen by the weights' sums before and after, since writing through ``.data`` leaves no other trace.
    """

    def __init__(self) -> None:
        self.arriving: tuple[list[str], Arrival] | None = None

    @contextmanager
    def unchanged(self, seen: Mapping[str, Tensor], names: Sequence[str]) -> Iterator[None]:
        """Take the tensors that a pass computes with, by name."""
        given = {name: seen[name] for name in names if name in seen and is_readable(seen[name])}
        before = {name: (place(tensor), total(tensor)) for name, tensor in given.items()}
        yield
        for name, tensor in given.items():
            if seen[name] is not tensor or place(tensor) != before[name][0]:
                raise written(name)
        if given:
            device = next(iter(given.values())).device
            pairs = [(before[name][1].to(device), total(tensor).to(device)) for name, tensor in given.items()]
            changed = torch.stack([(a != b) & ~(a.isnan() & b.isnan()) for a, b in pairs])
            self.arriving = list(given), Arrival(changed)
        self.check()

    def check(self) -> None:
        """Refuse what was found, once it has arrived."""
        if self.arriving is not None and self.arriving[1].here():
            (names, arrival), self.arriving = self.arriving, None
            for name, changed in zip(names, arrival.values.tolist(), strict=True):
                if changed:
                    raise written(name)


def written(name: str) -> UserError:
    return UserError(
        f"forward must leave the weights as they are, got a change of {name}: each path computes with a view of it, so "
        "the change is lost or made twice; change it after optimizer.step(), under torch.no_grad()"
    )


def is_readable(tensor: Tensor) -> bool:
    """Whether the tensor holds numbers of its own: not sharded, fake, or inside a transform of torch.func."""
    plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta and not tensor.is_inference()
    return plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def place(tensor: Tensor) -> tuple[int, int]:
    """The memory of the tensor and its version."""
    return tensor.data_ptr(), tensor._version


@torch.no_grad()
def total(tensor: Tensor) -> Tensor:
    wide = torch.float if tensor.device.type == "mps" else torch.double
    return tensor.sum(dtype=torch.complex128 if tensor.is_complex() else wide)


def marks_of(net: Any, names: Iterable[str]) -> dict[str, Any]:
    """By what a change of the model's floating-point buffers is recognised."""
    found = {name: net.model.get_buffer(name) for name in names}
    return {name: mark(buffer) for name, buffer in found.items() if buffer.is_floating_point()}


def is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class EmptiedLayers:
    """Warns once of every layer that loses its last weight. On a GPU the counts are read when they have arrived."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.arriving: tuple[list[str], int, Arrival] | None = None

    def check(self, names: Sequence[str], counts: Tensor, step: int) -> None:
        """Take the number of weights that each layer has left after a mask update; never waits for the device."""
        if not counts.is_cuda:
            self.warn(names, step, counts)
            return
        if self.arriving is not None and self.arriving[2].here():
            self.warn(*self.arriving[:2], self.arriving[2].values)
            self.arriving = None
        if self.arriving is None:
            self.arriving = (list(names), step, Arrival(counts))

    def warn(self, names: Sequence[str], step: int, counts: Tensor) -> None:
        for name, count in zip(names, counts.tolist(), strict=True):
            if not count and name not in self.known:
                self.known.add(name)
                warnings.warn(
                    f"layer {name} lost every weight at step {step}: nothing passes it any more; min_kept=… or "
                    "scope=dcil.ERK() keeps some",
                    stacklevel=9,  # the caller of net.step
                )

    def __reduce__(self) -> tuple[type[EmptiedLayers], tuple[()]]:
        return EmptiedLayers, ()  # an event cannot be copied


class Checks:
    """What was checked already, so that it is checked once and not in every step."""

    def __init__(self, paths: Sequence[str] = ("pruned",)) -> None:
        self.empty = False
        self.attributes = Attributes(paths)
        self.paths: set[str] = set()
        self.steps: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self.emptied, self.weights = EmptiedLayers(), Weights()
        self.copied, self.versions = False, [-1]
        self.announced: set[str] = set()

    def __getstate__(self) -> tuple[bool, list[str]]:
        return self.empty, list(self.attributes.values)  # a copy checks everything again

    def __setstate__(self, state: tuple[bool, list[str]]) -> None:
        empty, paths = state
        self.__init__(paths)  # type: ignore[misc]
        self.empty, self.copied = empty, True

    def new_phase(self, before: bool, mode: object) -> None:
        """Check the paths again when training begins again, since checkpointing may have been switched on."""
        if not isinstance(mode, bool):
            raise UserError(f"net.train must get True or False, got {described(mode)}")
        if mode != before:
            self.paths.clear()

    def initialised(self, mask: Tensor) -> None:
        """Refuse masks that hold whatever was in memory."""
        if self.empty or mask.is_meta:
            raise UserError(
                "the masks must be initialised after to_empty, got uninitialised memory: load a state dict, or call "
                "net.reset() once the weights have their values"
            )
        if mask.dtype != torch.bool:
            raise UserError(
                f"the masks must be bool, got {mask.dtype}: convert the net with net.to(dtype), not net.type"
            )

    def step(self, mask: Tensor, first: Any = None) -> None:
        """Refuse steps without masks, and a net's ``first`` one if its loss forgot a path."""
        self.initialised(mask)
        if first is not None:
            check_gradients(first.model, {path: first.get_submodule(path) for path in list(first.method.paths)[1:]})

    @contextmanager
    def watched(self, net: Any, path: str, seen: Mapping[str, Tensor]) -> Iterator[None]:
        """Surround a pass of ``path`` through ``seen``: the first one in training shows what forward changes."""
        self.weights.check()
        first = net.training and path not in self.paths and not torch.compiler.is_compiling() and not is_capturing()
        names = [] if not first else [*net.masks, *(() if path == "pruned" else net._shared)]
        buffers = marks_of(net, net._shared_buffers) if first and path == "pruned" and len(net.method.paths) > 1 else {}
        with self.attributes.of(path, net.model, first), self.weights.unchanged(seen, names), checkpointing_refused():
            yield
        self.shared_buffers({name for name, known in marks_of(net, buffers).items() if known != buffers[name]})

    def shared_buffers(self, changed: set[str]) -> None:
        """Warn once of buffers that the pruned path changes and the others read: they may be meant as a state."""
        if new := sorted(changed - self.announced):
            self.announced |= changed
            warnings.warn(
                f"forward changes the buffer {new[0]}, which is the pruned path's alone: the others read it after "
                "that; name its module in private=[…] to give each path its own",
                stacklevel=9,  # the caller of net
            )

    def output(self, path: str, output: Any) -> None:
        """Refuse checkpointing in a path's first output with gradients."""
        if path not in self.paths and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            refuse_checkpoints_in(output)
            self.paths.add(path)

    def masks(self, net: Any) -> None:
        """Refuse masks without values, other layers, and a copy with averaged masks, which keep too many."""
        self.initialised(net.first_mask)
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise UserError("torch.jit.trace must get a plain module, got a net: trace what net.finalize() returns")
        if net.training and not torch.compiler.is_compiling():
            self.same_layers(net)
        if not self.copied or torch.compiler.is_compiling():
            return
        masks = list(net.masks.values())
        versions = [mask._version for mask in masks]
        if versions != self.versions and not any(map(is_sharded, masks)):  # else known to be right
            found, left = int(count_true(masks).sum()), int(net._kept)
            if found > left + 0.01 * sum(mask.numel() for mask in masks):
                raise UserError(
                    f"the masks must be those of an update, which left {left} weights, got {found}: buffers were "
                    "averaged; use dcil.EMA(net), or averages without buffers (use_buffers=False)"
                )
            self.versions = versions

    def same_layers(self, net: Any) -> None:
        """Refuse layers exchanged since the last pass; where weights are sharded, since the training began."""
        known = net._bindings
        if not self.paths or not (net.is_sharded or (known is not None and known.current())):
            check_layers(net)

    def took_step(self, net: nn.Module, optimizer: Any) -> bool:
        """Whether the optimizer has stepped since this was asked last; the first time it is taken to have."""
        inner = unwrapped(optimizer)
        if inner not in self.steps:
            check_optimizer(net, [inner])
            self.steps[inner] = True
            steps = weakref.ref(self.steps)  # the optimizer must not keep the net alive

            def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
                if (noted := steps()) is not None and not is_capturing() and not was_skipped(optimizer):
                    noted[optimizer] = True

            inner.register_step_post_hook(note)
        stepped, self.steps[inner] = self.steps[inner], False
        return stepped

    def kept(self, names: Sequence[str], counts: Tensor, step: int) -> None:
        """Warn of layers that an update left without weights."""
        self.emptied.check(names, counts, step)
