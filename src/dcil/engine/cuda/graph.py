"""Train with the whole step, from gathering the batch to the optimizer's update, recorded as one CUDA graph.

The host waits for the device only to check for divergence. Weights, masks, learning rate and position in the data
change in place. Each computation that differs (by the method's ``loss_key``, the size of the batch) has a recording.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from dcil import SparseNet, Update
from dcil.data import Batches
from dcil.distillation import MutualDistillation
from dcil.engine import kernels
from dcil.engine.cuda.batches import make_source
from dcil.engine.cuda.capture import GraphRecorder, restoring
from dcil.engine.cuda.executors import FusedExecutor, PlainExecutor
from dcil.engine.cuda.flat import FlatParameters
from dcil.engine.cuda.mask_updates import RecordedHooks
from dcil.engine.cuda.rewrite import Unfusable
from dcil.engine.cuda.sgd import SGD
from dcil.engine.eager import autocast, diverged
from dcil.engine.evaluate import Evaluation
from dcil.engine.executor import Executor, Outputs, all_at_once, one_at_a_time
from dcil.engine.lock import PROCESS_LOCK
from dcil.engine.settings import EngineSettings
from dcil.engine.streams import Streams

CHECK_EVERY = 500  # steps between checks for a loss that is not finite, which wait for the device
NARROW = 64  # channels: up to here a network is bound by kernel launches, beyond by the GPU


class GraphEngine:
    """Computes what EagerEngine computes, up to the order of floating-point sums."""

    name = "graph"

    def __init__(self, net: SparseNet, optimizer: torch.optim.SGD, loader: Batches, settings: EngineSettings) -> None:
        self.net, self.optimizer, self.loader, self.settings = net, optimizer, loader, settings
        device = loader.device
        self.sgd = SGD.from_optimizer(optimizer)
        self.recorder = GraphRecorder(device)
        self.recordings: dict[Hashable, Callable[[], None]] = {}
        self.streams = Streams(device, ["main", "side"])
        self.minus_lr = torch.zeros((), device=device)
        self.sums = torch.zeros(3, dtype=torch.double, device=device)  # loss, hits, images
        self.evaluation = Evaluation(net, device)
        # Steps done, the first step whose loss was not finite (0: none), and that loss.
        self.count = torch.zeros((), dtype=torch.long, device=device)
        self.diverged_step = torch.zeros((), dtype=torch.long, device=device)
        self.diverged_loss = torch.zeros((), device=device)
        self.ready = False
        self.executor: Executor | None = None

    def prepare(self) -> None:
        """Move the parameters into flat memory, once, after the checkpoint has been loaded."""
        if self.ready:
            return
        with PROCESS_LOCK:
            self.settings.apply()
            self.flat = FlatParameters(self.net, self.optimizer)
            self.source = make_source(self.loader, exact=self.settings.precision == "fp32")
            self.net.hooks = RecordedHooks(self.net, self.flat, self.recorder)
            self.ready = True

    # -- training ----------------------------------------------------------------------------------------------------

    def epoch(self, epoch: int, rate: Callable[[int], float]) -> Iterator[Update | None]:
        """Train one epoch; yield each step's mask update, if any, without waiting for the device."""
        self.prepare()
        self.sums.zero_()
        self.count.fill_(self.net.steps_done)
        lr = None
        for i, size in enumerate(self.source.train(epoch)):
            if (wanted := rate(i)) != lr:
                lr = wanted
                self.minus_lr.fill_(-lr)
                self.optimizer.param_groups[0]["lr"] = lr
            key = self.net.method.loss_key(self.net.steps_done)
            self.recording("train", size, key, partial(self.step, size))()
            yield self.net.count_step(self.optimizer)
            if (i + 1) % CHECK_EVERY == 0:
                self.check()

    def step(self, size: int) -> None:
        """Run one training step; this is recorded. The batch and the metrics are computed on the side stream."""
        assert self.executor is not None
        run_paths = one_at_a_time if self.settings.low_memory else all_at_once
        with self.streams.forked() as on, autocast(self.loader.device, self.settings):
            with on("side"):
                x, y = self.source.batch(size)
            self.executor.begin()
        with self.streams.forked(late=True) as on, autocast(self.loader.device, self.settings):

            def on_loss(outputs: Outputs, loss: Tensor) -> None:
                with on("side"), torch.no_grad():
                    self.accumulate(loss, outputs, y)

            run_paths(self.executor, self.net.method.paths, self.loss, x, y, on_loss)
        with torch.no_grad():
            self.executor.finish()
            exact = self.settings.precision == "fp32"
            flat = self.flat
            self.sgd.step(flat.weights, flat.gradient, flat.momentum, self.minus_lr, self.diverged_step, exact)
            context = self.net.context(self.optimizer)
            self.net.method.after_step(dataclasses.replace(context, step=context.step + 1))

    def loss(self, outputs: Outputs, y: Tensor) -> Tensor:
        """Compute the method's loss, below fp32 in one kernel if there is one for its key."""
        key, p = self.net.method.loss_key(self.net.steps_done), outputs["pruned"]
        kernel = kernels.AVAILABLE and p.is_cuda and p.dim() == 2 and self.settings.precision != "fp32"
        if kernel and isinstance(key, MutualDistillation) and key.kind == "softmax":
            return kernels.loss.dcil_loss(p, outputs["super"], y, key.weight, key.temperature)
        return self.net.loss(outputs, y)

    def accumulate(self, loss: Tensor, outputs: Outputs, y: Tensor) -> None:
        """Count the step, add its loss and hits to the sums, and keep the first loss that is not finite."""
        self.count.add_(1)
        first = ~loss.isfinite() & (self.diverged_step == 0)
        self.diverged_loss.copy_(torch.where(first, loss, self.diverged_loss))
        self.diverged_step.copy_(torch.where(first, self.count, self.diverged_step))
        hits = (outputs["pruned"].argmax(1) == y).sum()
        self.sums.add_(torch.stack([loss.double() * len(y), hits.double(), torch.full_like(loss, len(y)).double()]))

    def recording(self, kind: str, size: int, variant: Hashable, work: Callable[[], None]) -> Callable[[], None]:
        key = (kind, size, variant)
        if key not in self.recordings:
            with PROCESS_LOCK, restoring(self.mutated()):
                if self.executor is None and kind == "train":
                    self.executor = choose_executor(self.net, self.flat, self.settings, self.source.batch(size)[0])
                self.recordings[key] = self.recorder.record(work, before=self.source.rewind)
        return self.recordings[key]

    def mutated(self) -> list[Tensor]:
        """Return every tensor that recorded work changes."""
        flat = self.flat
        mine = [self.sums, self.evaluation.counts, self.count, self.diverged_step, self.diverged_loss]
        mine += [flat.weights, flat.gradient, flat.momentum, flat.masks, flat.statistics.flat, flat.counters.flat]
        mine += [*self.net.state.values(), *self.net.model.buffers()]
        position = getattr(self.source, "position", None)
        return mine if position is None else [*mine, position]

    def totals(self) -> tuple[float, float, float]:
        """Return the last epoch's sum of the loss, hits and images; waits for the device."""
        self.check()
        loss, hits, images = self.sums.tolist()
        return loss, hits, images

    def check(self) -> None:
        if step := int(self.diverged_step):
            raise diverged(step, float(self.diverged_loss), self.optimizer.defaults["lr"])

    # -- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, tuple[float, float]]:
        """Return path -> (top-1, top-5) in percent; waits for the device."""
        self.prepare()

        def replay(size: int) -> None:
            self.recording("test", size, self.fused_evaluator is not None, partial(self.count_batch, size))()

        self.evaluation.run(self.source.test(), replay)
        return self.evaluation.accuracy()

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


def choose_executor(net: SparseNet, flat: FlatParameters, settings: EngineSettings, x: Tensor) -> Executor:
    """Choose the fused network if the model can be rewritten (stacked or a stream per path), else the plain one."""
    paths = tuple(net.method.paths)
    groups: list[list[tuple[str, ...]]] = [[(path,) for path in paths]] if settings.executor != "plain" else []
    if settings.executor == "auto" and x.is_cuda and not kernels.AVAILABLE:
        groups = []  # the fused network without its kernels would be slower than the plain one
    narrow = widest(net.model) <= NARROW
    # A narrow path is faster on its own stream, unless other runs share the GPU: then fewer launches count.
    stack = settings.executor == "stacked" or (settings.executor == "auto" and narrow and settings.shared_gpu)
    if stack and not settings.low_memory and len(paths) > 1:
        groups.insert(0, [paths])
    side_streams = not settings.shared_gpu and (narrow or len(paths) == 1)
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    for group in groups:
        try:
            executor = FusedExecutor(net, flat, dtype, group, side_streams, serial=settings.low_memory, x=x)
        except Unfusable:
            continue
        if agrees(executor, net, settings, x):
            return executor
    return PlainExecutor(net, flat)


def widest(model: nn.Module) -> int:
    return max((m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d)), default=0)


@torch.no_grad()
def agrees(executor: Executor, net: SparseNet, settings: EngineSettings, x: Tensor) -> bool:
    """Return whether the fused network computes what the network computes, on the first batch."""
    with autocast(x.device, settings):
        want = net(x)
        try:
            executor.begin()
            got = executor.outputs(x, net.method.paths, track=False)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError:  # shapes that do not match: a stack needs a convolution as its first operation
            return False
    off = [float((got[p].float() - want[p].float()).norm() / want[p].float().norm()) for p in want]
    return max(off) < (0.1 if settings.precision == "bf16" else 0.01)
