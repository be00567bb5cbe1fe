"""make_step: the training step of a loop of one's own, recorded on CUDA.

step = dcil.make_step(net, opt)
for x, y in loader:
    loss = step(x, y)            # forward of all paths, loss, backward, optimizer, masks
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dcil import EMA, SparseNet, Update, wiring
from dcil.checks import Arrival
from dcil.engine.executor import EagerExecutor, Inputs, Outputs, detached, one_at_a_time
from dcil.engine.loop_settings import Batch, LoopSettings
from dcil.engine.recordable import changed_number, host_numbers, host_random_state, step_obstacle
from dcil.errors import UserError, described
from dcil.task import Task

MISSING: Any = object()
#: Optimizer steps that are taken as they are before any is recorded: the first makes the optimizer's state, the second
#: shows what it counts on the host.
EAGER_STEPS = 2


class Step:
    """One training step; ``make_step`` makes it.

    how      "eager", or how the step is recorded
    outputs  path -> what the network returned in the last step, which the next step overwrites
    update   the mask update of the last step, if there was one
    """

    def __init__(self, net: nn.Module, optimizer: Optimizer, settings: LoopSettings) -> None:
        self.parallel = net if isinstance(net, DistributedDataParallel) else None
        self.net = checked_net(net.module if isinstance(net, DistributedDataParallel) else net)
        self.optimizer, self.settings = wiring.unwrapped(optimizer), settings
        wiring.check_optimizer(self.net, [self.optimizer])
        if self.net._attachment is not None:  # this counts the steps from now on
            self.net._attachment.remove()
            self.net._attachment = None
        self.counter = StepCounter(self.net, self.optimizer)
        self.part, self.first, self.steps = 0, True, 0
        self.eager_window = False  # the parts of this optimizer step are taken as they are
        self.counted_on_host: str | None = None
        self.reason, self.warned = settings.obstacle(self.net), False
        self.recorded: Any = None
        self.outputs: Outputs = {}
        self.update: Update | None = None

    def __call__(self, *inputs: Any, target: Any = MISSING, valid: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Train on a batch and return its loss, without waiting for the device.

        inputs  what the network is called with, then the target; keywords go to the network too
        target  the target, if it is not the last of ``inputs``
        valid   bool tensor of the positions that count in the KL terms, as for ``net.loss``
        """
        if target is MISSING:
            if not inputs:
                raise UserError("step must get a target, got keywords alone: step(**batch, target=batch['labels'])")
            *inputs, target = inputs  # type: ignore[assignment]
        if not self.net.training:
            raise UserError("step trains, got a net in evaluation mode: call net.train() first")
        batch, last = Batch(Inputs(tuple(inputs), kwargs), target, valid), self.part == self.settings.accumulate - 1
        self.first, self.part = self.part == 0, 0 if last else self.part + 1
        if self.first:
            self.decide()
        return self.eager(batch, last) if self.eager_window else self.replay(batch, last)

    @property
    def how(self) -> str:
        """How the last step was computed, and why not otherwise."""
        if self.recorded is not None:
            return str(self.recorded)
        return "eager" if self.reason is None else f"eager: {self.reason}"

    # -- as it is ----------------------------------------------------------------------------------------------------

    def eager(self, batch: Batch, last: bool) -> Tensor:
        """Take the step operation by operation."""
        settings = self.settings
        before = host_random_state(self.net) if self.steps < EAGER_STEPS else None
        with settings.autocasting(self.net), self.without_averaging(last):
            if settings.low_memory:
                executor = ScaledExecutor(self.net, settings)
                paths, loss_of = self.net.method.paths, partial(settings.loss, self.net)
                outputs, loss = one_at_a_time(executor, paths, loss_of, batch.inputs, batch.targets)
            else:
                outputs = (self.parallel or self.net)(*batch.inputs.args, **batch.inputs.kwargs)
                loss = settings.loss(self.net, outputs, batch.targets)
                settings.scaled(loss).backward()  # type: ignore[no-untyped-call]
        self.outputs = {path: detached(output) for path, output in outputs.items()}
        if before is not None and before != host_random_state(self.net):
            self.give_up("forward draws random numbers on the host")
        if last:
            self.take_step()
        return loss.detach()

    def take_step(self) -> None:
        settings, scaler = self.settings, self.settings.scaler
        before = host_numbers(self.optimizer) if self.steps < EAGER_STEPS else None
        if self.parallel is not None and settings.low_memory:
            settings.average(self.parallel, [p.grad for p in self.net.parameters() if p.grad is not None])
        if scaler is not None and settings.clip_norm:
            scaler.unscale_(self.optimizer)
        if settings.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), settings.clip_norm)
        found_inf = None
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            found_inf = settings.found_inf(self.optimizer)
            scaler.update()
        self.steps += 1
        if before is not None:
            self.counted_on_host = changed_number(before, host_numbers(self.optimizer))
        with nullcontext() if self.recorded is None else self.recorded.eager_hooks():
            self.update = self.counter.count(found_inf, wait=True)
        if settings.ema is not None:
            settings.ema.update()

    def without_averaging(self, last: bool) -> AbstractContextManager[Any]:
        """Return a context in which DDP does not average gradients that others are added to."""
        if self.parallel is None or (last and not self.settings.low_memory):
            return nullcontext()
        return self.parallel.no_sync()

    # -- recorded ----------------------------------------------------------------------------------------------------

    def decide(self) -> None:
        """Decide how the next optimizer step is taken: recorded, once the first ones have shown what happens in it."""
        first = self.recorded is None and self.reason is None and self.steps >= EAGER_STEPS
        if first and (reason := step_obstacle(self.net, self.settings.low_memory)):
            self.give_up(reason)
        elif first:
            from dcil.engine.cuda.recorded_loop import RecordedLoop

            self.recorded = RecordedLoop(
                self.net, self.optimizer, self.settings, self.parallel, self.counted_on_host, self.settings.compiler
            )
        self.eager_window = self.recorded is None
        if self.eager_window or first:
            self.optimizer.zero_grad()

    def replay(self, batch: Batch, last: bool) -> Tensor:
        """Take the step through its recording."""
        from dcil.engine.cuda.slots import Unrecordable

        try:
            result = self.recorded.run(batch, last)
        except Unrecordable as error:
            return self.instead(batch, last, error)
        self.outputs, self.net._parts = result.outputs, result.parts
        if last:
            self.update = self.counter.count(result.found_inf)
            self.recorded.average_weights()
        loss: Tensor = result.loss.clone()  # the next step overwrites it
        return loss

    def instead(self, batch: Batch, last: bool, error: Any) -> Tensor:
        """Take a step that cannot be recorded: this one, or this and all that follow."""
        if not error.once and (simpler := self.recorded.simpler()) is not None:
            self.recorded = simpler
            return self.replay(batch, last)
        self.recorded.surrender(error.once, self.first)
        if not error.once:
            self.recorded = None
            self.give_up(str(error))
        elif not self.warned:
            self.warned = True
            warnings.warn(f"make_step takes some steps as they are: {error}", stacklevel=4)
        self.eager_window = True
        return self.eager(batch, last)

    def give_up(self, reason: str) -> None:
        """Take all further steps as they are; on CUDA say why, since it costs much."""
        self.reason = reason
        if self.net.first_mask.is_cuda:
            warnings.warn(f"make_step records nothing and is slow: {reason}", stacklevel=4)


class ScaledExecutor(EagerExecutor):
    """Scales the loss before the backward pass."""

    def __init__(self, net: SparseNet, settings: LoopSettings) -> None:
        super().__init__(net)
        self.settings = settings

    def backward(self, loss: Tensor) -> None:
        super().backward(self.settings.scaled(loss))


class StepCounter:
    """Counts optimizer steps; those that a GradScaler skipped do not count.

    Whether a step was skipped is known on the device alone. Nobody waits for it but where a mask update may be due.
    """

    def __init__(self, net: SparseNet, optimizer: Optimizer) -> None:
        self.net, self.optimizer = net, optimizer
        self.arriving: list[Arrival] = []

    def count(self, found_inf: Tensor | None, wait: bool = False) -> Update | None:
        """Count a step, or learn later whether it counts; returns the mask update that followed, if any."""
        if found_inf is None:
            return self.net.count_step(self.optimizer)
        self.arriving.append(Arrival(found_inf))
        wait, update = wait or self.matters(), None
        while self.arriving and (wait or self.arriving[0].here()):
            if not self.arriving.pop(0).wait().any():
                update = self.net.count_step(self.optimizer)
        return update

    def matters(self) -> bool:
        """Whether masks may be due, or the loss another one, if all steps on their way count."""
        done, method = self.net.steps_done, self.net.method
        latest = done + len(self.arriving)
        return method.loss_key(latest) != method.loss_key(done) or any(map(method.due, range(done + 1, latest + 1)))


def checked_net(net: Any) -> SparseNet:
    if not isinstance(net, SparseNet):
        raise UserError(f"make_step must get a SparseNet, or DDP around one, got {described(net)}")
    return net


def make_step(
    net: nn.Module,
    optimizer: Any,
    task: Task = F.cross_entropy,
    *,
    logits: Callable[[Any], Tensor] | None = None,
    autocast: torch.dtype | None = None,
    scaler: Any = None,
    clip_norm: float = 0.0,
    accumulate: int = 1,
    ema: EMA | None = None,
    low_memory: bool = False,
    record: bool | None = None,
    compiler: str | None = "inductor",
) -> Step:
    """Return ``step``, which trains on a batch: ``loss = step(x, y)``.

    The step is that of the loop by hand: forward of all paths, ``net.loss``, backward, clipping, the optimizer, the
    count of the step and the masks when they are due. ``net.attach`` and ``net.step`` are then not called. The first
    two optimizer steps are taken as they are; on CUDA the following ones are recorded where nothing stands in the way:
    convolutional networks through dcil's own kernels, others through torch.compile. What ``forward`` decides on the
    host is then decided once. Where a step cannot be recorded it is taken as it is, and a warning says why.

    net         a SparseNet, or DistributedDataParallel around one
    task        the loss of one path, and
    logits      what finds the logits in an output, both as for ``net.loss``
    autocast    torch.bfloat16 or torch.float16: what convolutions and matrix products compute in
    scaler      a torch.amp.GradScaler, which float16 needs
    clip_norm   largest norm of all gradients together; 0: any
    accumulate  batches whose gradients are averaged for one optimizer step
    ema         a dcil.EMA of the net, updated after every optimizer step
    low_memory  hold the activations of one path at a time, for one more forward pass per step
    record      False: never; True: on the CPU too, where nothing is recorded but all else is as on CUDA
    compiler    the backend of torch.compile for networks that dcil has no kernels for; None compiles nothing
    """
    settings = LoopSettings(
        task, logits, autocast, scaler, clip_norm, accumulate, ema, low_memory, record, compiler
    )  # fmt: skip
    return Step(net, optimizer, settings)
