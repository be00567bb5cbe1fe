"""Data-parallel training: the step that one process would make of the global batch, each process on its shard of it.

DistributedDataParallel averages the gradients over the processes. A shard that is smaller than the others (the last
batch of an epoch rarely divides) counts for as many targets (images, or tokens) as it has: its loss is weighted with

    targets of the shard / targets of the batch * processes

so that the average is the mean over the targets. A process without any takes part with a loss of 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dcil import SparseNet, Update
from dcil.data import Batches
from dcil.engine.eager import EagerEngine, autocast
from dcil.engine.evaluate import Evaluation, Scores
from dcil.engine.executor import Inputs, one_at_a_time
from dcil.engine.process_group import ProcessGroup
from dcil.engine.settings import EngineSettings
from dcil.engine.step_settings import PLAIN, StepSettings


class DataParallelEngine(EagerEngine):
    """The eager step of several processes; a recorded step would have to record the communication with it.

    Masks are not communicated: the gradients are the same bits in every process, and so is what follows from them. That
    the masks are equal is checked at every evaluation. For the same reason torch need not broadcast the buffers.
    """

    def __init__(
        self,
        net: SparseNet,
        optimizer: Optimizer,
        loader: Batches,
        settings: EngineSettings,
        group: ProcessGroup,
        step_settings: StepSettings = PLAIN,
    ) -> None:
        super().__init__(net, optimizer, loader, settings, step_settings)
        self.group = group
        # One path at a time is several backward passes, each through some of the parameters: DDP expects one.
        self.parallel = None if settings.low_memory else self.wrap(net)

    def step(self, x: Tensor, y: Tensor) -> tuple[Tensor, Update | None]:
        targets = float(self.group.sum(torch.tensor(y.numel(), dtype=torch.double, device=x.device)))
        weight = y.numel() * self.group.world_size / targets

        def loss(outputs: Mapping[str, Tensor], y: Tensor) -> Tensor:
            if not len(y):  # the mean of nothing is NaN; the sum is 0
                return torch.stack([output.sum() for output in outputs.values()]).sum()
            return self.loss(outputs, y) * weight

        with autocast(x.device, self.settings):
            if self.parallel is None:
                self.optimizer.zero_grad()
                output, part = one_at_a_time(self.executor, self.net.method.paths, loss, Inputs((x,)), y)
                totals = self.totals_of(part * targets / self.group.world_size, output, y)
                self.average_weights()
            else:
                output = self.parallel(x)
                part = loss(output, y)
                totals = self.totals_of(part * targets / self.group.world_size, output, y)
                self.optimizer.zero_grad()
                part.backward()  # type: ignore[no-untyped-call]
        self.average_gradients(self.net.buffers())  # a method may train buffers
        self.step_settings.clip(self.net.parameters())
        self.optimizer.step()
        return totals, self.net.step(self.optimizer)

    def wrap(self, net: SparseNet) -> nn.Module:
        """Return what the network is called through, so that its gradients are averaged."""
        with warnings.catch_warnings():  # torch 2.13 renames the option; 2.11 knows the old name only
            warnings.simplefilter("ignore", FutureWarning)
            return DistributedDataParallel(net, broadcast_buffers=False)

    def average_weights(self) -> None:
        """Average the gradients of the weights where ``wrap`` does not."""
        self.average_gradients(self.net.parameters())

    def check_masks(self) -> None:
        """Refuse masks that are not the same in every process."""
        self.group.check_equal("the masks", fingerprint(self.net.masks.values()))

    def totals_of(self, loss: Tensor, output: Mapping[str, Tensor], y: Tensor) -> Tensor:
        """Return loss, hits and targets summed over the global batch; a loss that is not finite stops every process."""
        hits = (output["pruned"].detach().argmax(-1) == y).sum()
        totals = self.group.sum(torch.stack([loss.detach(), hits, torch.full_like(hits, y.numel())]).double())
        self.check(totals[0] / totals[2])
        return totals

    def average_gradients(self, tensors: Iterable[Tensor]) -> None:
        """Average the gradients as DDP does; a process without images may have no gradient, which counts as 0."""
        gradients = []
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                gradients.append(tensor.grad)
        self.average(gradients)

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its mean over the processes, in one all-reduce."""
        if not tensors:
            return
        flat = self.group.sum(torch.cat([tensor.flatten() for tensor in tensors])) / self.group.world_size
        means = torch.split(flat, [tensor.numel() for tensor in tensors])
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean.view_as(tensor))

    def evaluate(self) -> dict[str, Scores]:
        """Return path -> scores; every target is counted once, by the process whose shard has it."""
        self.synchronise()
        evaluation = Evaluation(self.net, self.loader.device)
        with autocast(self.loader.device, self.settings):
            evaluation.run(self.loader.test(), lambda batch: evaluation.add(*batch))
        return evaluation.scores(self.group.sum)

    def synchronise(self) -> None:
        """Average norm statistics that every process tracks for itself, and check that the masks are equal."""
        norms = [m for m in self.net.modules() if isinstance(m, _BatchNorm)] if self.group.local_norms else []
        statistics = (t for norm in norms for t in (norm.running_mean, norm.running_var))
        with torch.no_grad():
            self.average([t for t in statistics if t is not None])
        self.check_masks()


def fingerprint(masks: Iterable[Tensor]) -> Tensor:
    """Return a hash of the masks: every position has its own factor, and integers wrap around."""
    found = torch.zeros((), dtype=torch.long)
    for mask in masks:
        mixed = torch.arange(1, mask.numel() + 1, device=mask.device) * 0x1E3779B97F4A7C15
        mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
        found = found.to(mask.device) * 31 + (mask.flatten() * mixed).sum()
    return found
