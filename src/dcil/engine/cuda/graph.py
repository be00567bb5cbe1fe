"""Train with the whole step, from gathering the batch to the optimizer's update, recorded as one CUDA graph.

The host waits for the device only to check for divergence. Weights, masks, learning rate and position in the data
change in place. Each computation that differs (by the method's ``loss_key``, the size of the batch) has a recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from dcil import SparseNet, Update
from dcil.data import Batches
from dcil.engine.cuda.batches import make_source
from dcil.engine.cuda.capture import GraphRecorder, Recordings
from dcil.engine.cuda.choose import choose
from dcil.engine.cuda.fused_executor import FusedExecutor
from dcil.engine.cuda.losses import Rows, recorded_loss
from dcil.engine.cuda.mask_updates import RecordedHooks
from dcil.engine.cuda.training_step import TrainingStep
from dcil.engine.cuda.updates import move_steps
from dcil.engine.eager import NO_SUMS, autocast, diverged
from dcil.engine.evaluate import Evaluation, Scores
from dcil.engine.executor import Executor, Inputs, Outputs
from dcil.engine.lock import PROCESS_LOCK
from dcil.engine.settings import EngineSettings
from dcil.engine.step_settings import PLAIN, StepSettings, by_target
from dcil.engine.streams import Streams

CHECK_EVERY = 500  # steps between checks for a loss that is not finite, which wait for the device


class GraphEngine:
    """Computes what EagerEngine computes, up to the order of floating-point sums."""

    name = "graph"

    def __init__(
        self,
        net: SparseNet,
        optimizer: Optimizer,
        loader: Batches,
        settings: EngineSettings,
        step_settings: StepSettings = PLAIN,
    ) -> None:
        self.net, self.optimizer, self.loader, self.settings = net, optimizer, loader, settings
        self.step_settings = step_settings
        device = loader.device
        self.recorder = GraphRecorder(device)
        self.recordings = Recordings(self.recorder)
        self.streams = Streams(device, ["main", "side"])
        self.sums = torch.zeros(3, dtype=torch.double, device=device)  # loss, hits, targets
        self.evaluation = Evaluation(net, device)
        # Steps done, the first step whose loss was not finite (0: none), and that loss.
        self.count = torch.zeros((), dtype=torch.long, device=device)
        self.diverged_step = torch.zeros((), dtype=torch.long, device=device)
        self.diverged_loss = torch.zeros((), device=device)
        self.step: TrainingStep | None = None
        settings.apply()
        self.source = make_source(loader, exact=settings.precision == "fp32")

    def prepare(self, x: Tensor) -> TrainingStep:
        """Choose how to train, once the checkpoint has been loaded and there is a batch."""
        net, settings = self.net, self.settings
        with PROCESS_LOCK:
            self.recordings.kept.clear()  # of evaluations, before the weights are moved
            executor, update = choose(net, self.optimizer, settings, Inputs((x,)), self.diverged_step)
            move_steps(self.optimizer, self.loader.device)
            flat = executor.flat if isinstance(executor, FusedExecutor) else None
            net.hooks = RecordedHooks(net, flat)
            loss = recorded_loss(net, self.loss, self.rows, getattr(executor, "backend", None))
            clip = self.step_settings.clip_norm
            self.step = TrainingStep(net, self.optimizer, executor, update, loss, settings.low_memory, clip)
        return self.step

    @property
    def executor(self) -> Executor | None:
        return None if self.step is None else self.step.executor

    def loss(self, outputs: Outputs, y: Tensor) -> Tensor:
        return self.step_settings.loss(self.net, outputs, y)

    def rows(self, outputs: Outputs, y: Tensor) -> Rows | None:
        """Return what the kernel of the loss needs; it rounds otherwise than torch, so none in fp32."""
        if self.step_settings != PLAIN or self.settings.precision == "fp32":
            return None
        return by_target(outputs["pruned"]), by_target(outputs["super"]), y.flatten()

    # -- training ----------------------------------------------------------------------------------------------------

    def epoch(
        self, epoch: int, rate: Callable[[int], float], start: int = 0, sums: Sequence[float] = NO_SUMS
    ) -> Iterator[Update | None]:
        """Train one epoch; yield each step's mask update, if any, without waiting for the device."""
        self.sums.copy_(torch.tensor(sums, dtype=torch.double))
        self.count.fill_(self.net.steps_done)
        for i, size in enumerate(self.source.train(epoch, start), start):
            step = self.step or self.prepare(self.source.peek(size))
            for group in self.optimizer.param_groups:
                group["lr"] = rate(i)
            step.update.set_rates()
            key = ("train", size, loss := self.net.method.loss_key(self.net.steps_done))
            self.recordings.forget(lambda old, loss=loss: old[0] == "train" and old[2] != loss)  # type: ignore[misc]
            self.recordings.run(key, partial(self.train_on, step, size))
            yield self.net.count_step(self.optimizer)
            if (i + 1) % CHECK_EVERY == 0:
                self.check()

    def train_on(self, step: TrainingStep, size: int) -> None:
        """Run one training step; this is recorded. The batch and the metrics are computed on the side stream."""
        with self.streams.forked() as on, autocast(self.loader.device, self.settings):
            with on("side"):
                x, y = self.source.batch(size)
            step.begin()
        with self.streams.forked(late=True) as on, autocast(self.loader.device, self.settings):

            def on_loss(outputs: Outputs, loss: Tensor) -> None:
                with on("side"), torch.no_grad():
                    self.accumulate(loss, outputs, y)

            step.compute(Inputs((x,)), y, on_loss)
        step.collect()
        step.apply()

    def accumulate(self, loss: Tensor, outputs: Outputs, y: Tensor) -> None:
        """Count the step, add its loss and hits to the sums, and keep the first loss that is not finite."""
        self.count.add_(1)
        first = ~loss.isfinite() & (self.diverged_step == 0)
        self.diverged_loss.copy_(torch.where(first, loss, self.diverged_loss))
        self.diverged_step.copy_(torch.where(first, self.count, self.diverged_step))
        hits, targets = (outputs["pruned"].argmax(-1) == y).sum(), y.numel()
        self.sums.add_(torch.stack([loss.double() * targets, hits.double(), torch.full_like(loss, targets).double()]))

    def totals(self) -> tuple[float, float, float]:
        """Return the epoch's sum of the loss, hits and targets; waits for the device."""
        self.check()
        loss, hits, targets = self.sums.tolist()
        return loss, hits, targets

    def synchronise(self) -> None: ...

    def check(self) -> None:
        if step := int(self.diverged_step):
            raise diverged(step, float(self.diverged_loss), self.optimizer.defaults["lr"])

    # -- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, Scores]:
        """Return path -> scores; waits for the device."""

        def count(size: int) -> None:
            self.recordings.run(("test", size, self.fused_evaluator is not None), partial(self.count_batch, size))

        self.evaluation.run(self.source.test(), count)
        return self.evaluation.scores()

    @torch.no_grad()
    def count_batch(self, size: int) -> None:
        """Count the next test batch; this is recorded."""
        x, y = self.source.test_batch(size)
        with autocast(self.loader.device, self.settings):
            outputs = self.fused_evaluator.evaluate(x) if self.fused_evaluator else None
            self.evaluation.add(x, y, (lambda path, x: outputs[path]) if outputs else None)

    @property
    def fused_evaluator(self) -> FusedExecutor | None:
        """Return the fused network if it exists and may evaluate: same graph in both modes, precision below fp32."""
        exact, executor = self.settings.precision == "fp32", self.executor
        return executor if isinstance(executor, FusedExecutor) and executor.evaluates and not exact else None
