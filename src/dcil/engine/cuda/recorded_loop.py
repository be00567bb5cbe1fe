"""The recorded side of ``make_step``: inputs in slots, one recording for each computation, what invalidates them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dcil import SparseNet
from dcil.engine.cuda.capture import GraphRecorder, Recordings
from dcil.engine.cuda.choose import choose
from dcil.engine.cuda.fused_executor import FusedExecutor
from dcil.engine.cuda.losses import Rows, recorded_loss
from dcil.engine.cuda.mask_updates import RecordedHooks
from dcil.engine.cuda.scaling import ScaledUpdate, Scaling
from dcil.engine.cuda.slots import Slots, Unrecordable
from dcil.engine.cuda.training_step import TrainingStep
from dcil.engine.cuda.updates import move_steps
from dcil.engine.cuda.watched import Watched
from dcil.engine.executor import Gradients, Inputs, Outputs
from dcil.engine.lock import PROCESS_LOCK
from dcil.engine.loop_settings import Batch, LoopSettings
from dcil.engine.recordable import optimizer_obstacle
from dcil.engine.settings import EngineSettings
from dcil.errors import UserError
from dcil.task import IGNORED

MAX_CHANGES = 8  # of the network's or the optimizer's settings, after each of which everything is recorded anew


class Result(NamedTuple):
    """What a step leaves in fixed memory."""

    loss: Tensor
    outputs: Outputs
    parts: dict[str, Any]
    gradients: Gradients
    found_inf: Tensor | None


class RecordedLoop:
    """Takes the steps of an ``own_loop.Step``; ``compiler`` is torch.compile's backend, None compiles nothing."""

    def __init__(
        self,
        net: SparseNet,
        optimizer: Optimizer,
        settings: LoopSettings,
        parallel: DistributedDataParallel | None,
        counted_on_host: str | None,
        compiler: str | None,
    ) -> None:
        self.net, self.optimizer, self.settings, self.parallel = net, optimizer, settings, parallel
        self.counted_on_host, self.compiler = counted_on_host, compiler
        self.device = self.net.first_mask.device
        self.recorder = GraphRecorder(self.device)
        self.recordings, self.slots = Recordings(self.recorder), Slots(self.device)
        self.step: TrainingStep | None = None
        self.eager_optimizer = optimizer_obstacle(optimizer, counted_on_host, settings.scaler)
        self.changes = 0
        self.weight = torch.zeros((), device=self.device)  # of the present values in the average

    def __str__(self) -> str:
        executor = None if self.step is None else self.step.executor
        executor = executor.executor if isinstance(executor, Scaling) else executor
        fused = isinstance(executor, FusedExecutor)
        how = "fused" if fused else "compiled" if getattr(executor, "backend", None) else "as it is"
        eager = "" if self.eager_optimizer is None else f"; the optimizer steps eagerly: {self.eager_optimizer}"
        return f"recorded, {how}{eager}"

    def run(self, batch: Batch, last: bool) -> Result:
        """Train on the batch; nothing waits for the device."""
        self.look_for_changes()
        shapes, static = self.slots.fill((batch.inputs.args, dict(batch.inputs.kwargs), *batch.targets))
        key = (shapes, last, self.net.method.loss_key(self.net.steps_done), self.surroundings())
        if self.step is not None and key in self.recordings.kept:
            self.step.update.set_rates()
            result: Result = self.recordings.kept[key]()
        else:
            args, kwargs, *targets = static
            result = self.record(key, Batch(Inputs(args, kwargs), *targets), last)
        if last and self.eager_optimizer is not None:
            for owner, gradient in result.gradients.items():
                if isinstance(owner, nn.Parameter):
                    owner.grad = gradient
            result = result._replace(found_inf=self.apply_eagerly())
        return result

    def record(self, key: Hashable, batch: Batch, last: bool) -> Result:
        """Take a step whose computation is new: the first times as it is, then recorded."""
        self.recordings.forget(lambda old: old[2] != self.net.method.loss_key(self.net.steps_done))
        with self.checked():
            step = self.step or self.prepare(batch)
            step.update.set_rates()
            result: Result = self.recordings.run(key, partial(self.work, step, batch, last))
        return result

    def work(self, step: TrainingStep, batch: Batch, last: bool) -> Result:
        """Compute the step: this is recorded."""
        with self.settings.autocasting(self.net):
            self.share_buffers()
            step.begin()
            outputs, loss = step.compute(batch.inputs, batch.targets)
        gradients = step.collect(last)
        if last and self.eager_optimizer is None:
            step.apply()
        found = step.update.found_inf if isinstance(step.update, ScaledUpdate) and last else None
        kept = gradients if self.eager_optimizer is not None else {}
        return Result(loss, outputs, dict(self.net._parts), kept, found)

    def apply_eagerly(self) -> Tensor | None:
        """Step the optimizer outside of the recording."""
        settings, scaler = self.settings, self.settings.scaler
        if scaler is not None and settings.clip_norm:
            scaler.unscale_(self.optimizer)
        if settings.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), settings.clip_norm)
        if scaler is None:
            self.optimizer.step()
            return None
        scaler.step(self.optimizer)
        found: Tensor = settings.found_inf(self.optimizer)
        scaler.update()
        return found

    # -- preparing ---------------------------------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> TrainingStep:
        """Choose how to train."""
        net, settings = self.net, self.settings
        diverged = torch.zeros((), dtype=torch.long, device=self.device)
        with PROCESS_LOCK:
            executor, update = choose(net, self.optimizer, self.engine_settings(), batch.inputs, diverged)
            flat = executor.flat if isinstance(executor, FusedExecutor) else None
            net.hooks = self.hooks = RecordedHooks(net, flat)
            self.averaging = Recordings(self.hooks.recorder)
            self.hooks.records_after_step = self.eager_optimizer is None
            if settings.scaler is not None:
                executor = Scaling(executor, settings.scaler)
                update = ScaledUpdate(self.optimizer, self.device, settings.scaler)
            if self.eager_optimizer is None:
                move_steps(self.optimizer, self.device)
            backend = getattr(executor, "backend", None)
            loss = recorded_loss(net, partial(settings.loss, net), self.rows, backend, ignored=IGNORED)
            average = None if self.parallel is None else partial(settings.average, self.parallel)
            self.step = TrainingStep(
                net, self.optimizer, executor, update, loss, settings.low_memory, settings.clip_norm,
                settings.accumulate, average,
            )  # fmt: skip
        self.watched = Watched(self.net, self.optimizer)
        return self.step

    def engine_settings(self) -> EngineSettings:
        half, executor = self.settings.half(self.device), "plain" if self.compiler is None else "auto"
        if self.compiler is not None and (half == torch.float16 or self.compiler != "inductor"):
            executor = "compiled"  # no kernels in float16, and another compiler is asked for to be used
        tf32 = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"
        precision = "bf16" if half == torch.bfloat16 else tf32
        low_memory, compiler = self.settings.low_memory, self.compiler or ""
        return EngineSettings("graph", precision, low_memory, executor=executor, compiler=compiler)

    def rows(self, outputs: Outputs, targets: tuple[Any, Tensor | None]) -> Rows | None:
        """Return what the kernel of the loss needs, if the loss is what it computes; it rounds otherwise than torch."""
        p, s, (y, valid) = outputs["pruned"], outputs["super"], targets
        if not isinstance(p, Tensor) or not isinstance(y, Tensor) or valid is not None or p.dim() != 2:
            return None
        task = self.settings.task
        plain = task is torch.nn.functional.cross_entropy or (
            type(task) is nn.CrossEntropyLoss and repr(vars(task)) == repr(vars(nn.CrossEntropyLoss()))
        )
        exact = self.settings.half(self.device) is None and not torch.backends.cuda.matmul.allow_tf32
        fits = plain and self.settings.logits is None and y.dtype == torch.long and y.shape == p.shape[:1]
        return (p, s, y) if fits and not exact else None

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Turn whatever a compiler or a recording stumbles over into Unrecordable; buffers are as they were."""
        before = [buffer.clone() for buffer in self.net.buffers()] if self.step is None else None
        try:
            # Algorithms are compared while the first steps run, unless the user wants the same ones every time.
            cudnn = torch.backends.cudnn
            with cudnn.flags(cudnn.enabled, not cudnn.deterministic, cudnn.benchmark_limit, cudnn.deterministic,
                             cudnn.allow_tf32):  # fmt: skip
                yield
        except (Unrecordable, UserError, torch.OutOfMemoryError, KeyboardInterrupt):
            raise
        except Exception as error:
            if before is not None:
                for buffer, value in zip(self.net.buffers(), before, strict=True):
                    buffer.copy_(value)
            first_line = str(error).strip().partition("\n")[0]
            raise Unrecordable(f"{type(error).__name__}: {first_line}") from error

    def simpler(self) -> RecordedLoop | None:
        """Return what records the network without compiling it, if this one compiles or could not be prepared."""
        compiles = self.step is None or getattr(self.step.executor, "backend", None)
        if self.compiler is None or not compiles:
            return None
        plain = RecordedLoop(self.net, self.optimizer, self.settings, self.parallel, self.counted_on_host, None)
        plain.changes = self.changes
        return plain

    def surrender(self, once: bool, first: bool) -> None:
        """Leave the gradients of the parts that are done, if any, where an eager step adds to them."""
        if not once:
            self.net.hooks = self.net.method
        for parameter in self.net.parameters():
            parameter.grad = None
        if self.step is None or not self.step.totals or first:
            return
        executor = self.step.executor
        if isinstance(executor, FusedExecutor):
            executor.flat.link_gradients()
            self.step.hand_out({executor.flat.weights: executor.flat.gradient})
        else:
            self.step.hand_out({})

    @contextmanager
    def eager_hooks(self) -> Iterator[None]:
        """While open, the method's own hook is called after a step."""
        if self.step is None:
            yield
            return
        before, self.hooks.records_after_step = self.hooks.records_after_step, False
        yield
        self.hooks.records_after_step = before

    # -- what changes ------------------------------------------------------------------------------------------------

    def surroundings(self) -> Hashable:
        """Return what the code around a step may have set."""
        kind = self.device.type
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_grad_enabled()

    def look_for_changes(self) -> None:
        """Begin anew if a recording would compute with what is no longer there."""
        if self.step is None or self.watched.same():
            return
        self.changes += 1
        if self.changes > MAX_CHANGES:
            raise Unrecordable("weights, modes or the optimizer's settings change again and again")
        self.recordings, self.step = Recordings(self.recorder), None

    # -- beside the step -----------------------------------------------------------------------------------------------

    def average_weights(self) -> None:
        """Update the moving average, if there is one."""
        ema = self.settings.ema
        if ema is None:
            return
        self.weight.fill_(ema.next_weight())
        self.averaging.run("average", partial(ema.average, self.weight))
        ema.net.take_position(self.net)

    def share_buffers(self) -> None:
        """Give every process the first one's norm statistics, as DDP does before a forward pass."""
        parallel = self.parallel
        if parallel is None or not parallel.broadcast_buffers:
            return
        for buffer in self.net.buffers():
            if buffer.is_floating_point():
                dist.broadcast(buffer, 0, group=parallel.process_group)
