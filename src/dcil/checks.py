"""Checks: what is checked when something happens for the first time, or announced once, and not in every step."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcil.errors import UserError
from dcil.sharding import count_true, is_sharded
from dcil.wiring import check_gradients, check_optimizer, refuse_checkpoints_in, unwrapped, was_skipped


class EmptiedLayers:
    """Warns once of every layer that loses its last weight. On a GPU the counts are read when they have arrived."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.arriving: tuple[list[str], int, Tensor, torch.cuda.Event] | None = None

    def check(self, names: Sequence[str], counts: Tensor, step: int) -> None:
        """Take the number of weights that each layer has left after a mask update; never waits for the device."""
        if not counts.is_cuda:
            self.warn(names, step, counts)
            return
        if self.arriving is not None and self.arriving[3].query():  # type: ignore[no-untyped-call]
            self.warn(*self.arriving[:3])
            self.arriving = None
        if self.arriving is None:
            host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True).copy_(counts, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self.arriving = (list(names), step, host, event)

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

    def __init__(self) -> None:
        self.empty = False
        self.paths: set[str] = set()
        self.steps: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self.emptied = EmptiedLayers()
        self.copied, self.versions = False, [-1]

    def __getstate__(self) -> bool:
        return self.empty  # a copy checks everything again

    def __setstate__(self, empty: bool) -> None:
        self.__init__()  # type: ignore[misc]
        self.empty, self.copied = empty, True

    def new_phase(self, changed: bool) -> None:
        """Check the paths again when training begins again, since checkpointing may have been switched on."""
        if changed:
            self.paths.clear()

    def initialised(self, mask: Tensor) -> None:
        """Refuse masks that hold whatever was in memory."""
        if self.empty or mask.is_meta:
            raise UserError(
                "the masks must be initialised after to_empty, got uninitialised memory: load a state dict, or call "
                "net.reset() once the weights have their values"
            )

    def step(self, mask: Tensor, first: Any = None) -> None:
        """Refuse steps without masks, and a net's ``first`` one if its loss forgot a path."""
        self.initialised(mask)
        if first is not None:
            check_gradients(first.model, {path: first.get_submodule(path) for path in list(first.method.paths)[1:]})

    def output(self, path: str, output: Any) -> None:
        """Refuse checkpointing in a path's first output with gradients."""
        if path not in self.paths and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            refuse_checkpoints_in(output)
            self.paths.add(path)

    def masks(self, net: Any) -> None:
        """Refuse masks without values, and a copy whose masks were averaged: more are kept than the updates left."""
        self.initialised(net.first_mask)
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

    def took_step(self, net: nn.Module, optimizer: Any) -> bool:
        """Whether the optimizer has stepped since this was asked last; the first time it is taken to have."""
        inner = unwrapped(optimizer)
        if inner not in self.steps:
            check_optimizer(net, [inner])
            self.steps[inner] = True
            steps = weakref.ref(self.steps)  # the optimizer must not keep the net alive

            def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
                if (noted := steps()) is not None and not was_skipped(optimizer):
                    noted[optimizer] = True

            inner.register_step_post_hook(note)
        stepped, self.steps[inner] = self.steps[inner], False
        return stepped

    def kept(self, names: Sequence[str], counts: Tensor, step: int) -> None:
        """Warn of layers that an update left without weights."""
        self.emptied.check(names, counts, step)
