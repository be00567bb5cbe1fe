"""The training step of several processes: what one process makes of the joint batch, each on its share of it.

DistributedDataParallel averages the gradients over the processes. A share that is smaller than the others (the last
batch of an epoch rarely divides) counts for as many images as it has: its loss is weighted with

    images of the share / images of the batch * processes

so that the average is the mean over the images. A process without any takes part with a loss of 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from dcil import SparseNet, Update, engine
from dcil.data import Batches
from dcil.engine import EagerEngine, Engine, EngineSettings
from dcil.engine.cuda.executor import one_at_a_time
from dcil.engine.eager import autocast
from dcil.engine.evaluate import correct
from dcil.engine.process_group import ProcessGroup
from dcil.engine.sync_batch_norm import synchronise_batch_norms
from dcil.errors import UserError


def build(
    net: SparseNet, optimizer: torch.optim.SGD, loader: Batches, speed: EngineSettings, team: ProcessGroup
) -> Engine:
    """The engine for a team; one process alone has the choice of all engines."""
    if team.world == 1:
        return engine.build(net, optimizer, loader, speed)
    if speed.engine == "graph":
        raise UserError("--engine graph trains in one process: under torchrun say --engine eager, or nothing")
    wanted = replace(speed, engine="eager").on(loader.device)
    if reason := engine.obstacle(net, wanted):
        raise UserError(f"this network cannot be trained so: {reason}")
    if not team.local_norms:
        synchronise_batch_norms(net, loader.device)
    wanted.apply()
    return DataParallelEngine(net, optimizer, loader, wanted, team)


class DataParallelEngine(EagerEngine):
    """Eager, because a recorded step would have to record the communication with it.

    Masks are not sent around: the gradients are the same bits everywhere, and so is what follows from them. That they
    are equal is checked at the end of every epoch. For the same reason torch need not broadcast the buffers.
    """

    def __init__(
        self, net: SparseNet, optimizer: torch.optim.SGD, loader: Batches, speed: EngineSettings, team: ProcessGroup
    ) -> None:
        super().__init__(net, optimizer, loader, speed)
        self.team = team
        # One path at a time is several backward passes, each through a part of the parameters: too many for DDP.
        self.parallel = None if speed.low_memory else parallel(net)

    def step(self, x: Tensor, y: Tensor) -> tuple[Tensor, Update | None]:
        images = float(self.team.sum(torch.tensor(len(y), dtype=torch.double, device=x.device)))
        weight = len(y) * self.team.world / images

        def loss(outputs: Mapping[str, Tensor], target: Tensor) -> Tensor:
            if not len(target):  # the mean of nothing is not a number; the sum of nothing is 0
                return torch.stack([output.sum() for output in outputs.values()]).sum()
            return self.net.loss(outputs, target) * weight

        with autocast(x.device, self.speed):
            if self.parallel is None:
                self.optimizer.zero_grad()
                output, part = one_at_a_time(self.route, self.net.method.paths, loss, x, y)
                totals = self.totals_of(part * images / self.team.world, output, y)
                self.average_gradients(self.net.parameters())
            else:
                output = self.parallel(x)
                part = loss(output, y)
                totals = self.totals_of(part * images / self.team.world, output, y)
                self.optimizer.zero_grad()
                part.backward()  # type: ignore[no-untyped-call]
        self.average_gradients(self.net.buffers())  # a method may train what is not a parameter
        self.optimizer.step()
        return totals, self.net.step(self.optimizer)

    def totals_of(self, loss: Tensor, output: Mapping[str, Tensor], y: Tensor) -> Tensor:
        """Sum of the loss, hits and images of the joint batch; a loss that is not finite stops every process."""
        hits = (output["pruned"].detach().argmax(1) == y).sum()
        totals = self.team.sum(torch.stack([loss.detach(), hits, torch.full_like(hits, len(y))]).double())
        self.check(totals[0] / totals[2])
        return totals

    def average_gradients(self, tensors: Iterable[Tensor]) -> None:
        """What DistributedDataParallel does; without an image a process may have no gradient, which counts as 0."""
        gradients = []
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                gradients.append(tensor.grad)
        self.average(gradients)

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes its mean over the processes; all of them travel together."""
        if not tensors:
            return
        flat = self.team.sum(torch.cat([tensor.flatten() for tensor in tensors])) / self.team.world
        means = torch.split(flat, [tensor.numel() for tensor in tensors])
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean.view_as(tensor))

    @torch.no_grad()
    def evaluate(self) -> dict[str, tuple[float, float]]:
        """As one process would count: every image once, by the process whose share it is in."""
        self.settle()
        training = self.net.training
        self.net.eval()
        paths = list(self.net.method.paths)
        counts = torch.zeros(len(paths) + 1, 2, dtype=torch.long, device=self.loader.device)
        with autocast(self.loader.device, self.speed):
            for x, y in self.loader.test():
                for i, path in enumerate(paths):
                    counts[i] += correct(self.net.path(path, x), y)
                counts[-1] += len(y)
        self.net.train(training)
        *hits, (images, _) = self.team.sum(counts).tolist()
        return {
            path: (100 * top1 / images, 100 * top5 / images) for path, (top1, top5) in zip(paths, hits, strict=True)
        }

    def settle(self) -> None:
        """Make sure of one network: where every process has its own norm statistics, their mean counts."""
        norms = [m for m in self.net.modules() if isinstance(m, _BatchNorm)] if self.team.local_norms else []
        statistics = (t for norm in norms for t in (norm.running_mean, norm.running_var))
        self.average([t for t in statistics if t is not None])
        self.team.agree("the masks", fingerprint(self.net.masks.values()))


def parallel(net: SparseNet) -> DistributedDataParallel:
    with warnings.catch_warnings():  # torch 2.13 has a new name for the option, which 2.11 does not know
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(net, broadcast_buffers=False)


def fingerprint(masks: Iterable[Tensor]) -> Tensor:
    """A number that two sets of masks hardly share: every place has its own, and integers wrap around."""
    found = torch.zeros((), dtype=torch.long)
    for mask in masks:
        mixed = torch.arange(1, mask.numel() + 1, device=mask.device) * 0x1E3779B97F4A7C15
        mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
        found = found.to(mask.device) * 31 + (mask.flatten() * mixed).sum()
    return found
