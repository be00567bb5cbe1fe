"""Engines run the training steps: ``EagerEngine`` is the reference, the graph engine the fast one on CUDA.

Public: ``build``, the ``Engine`` protocol, ``EngineSettings``, ``StepSettings``, ``executor`` (how a step computes),
``evaluate``, ``process_group``, ``data_parallel``, ``sharded`` and ``sync_batch_norm`` (several processes), ``lock``
and ``streams`` (several runs in one process). Private: ``cuda``, the graph engine, and ``kernels``, its Triton kernels;
without CUDA graphs and Triton the graph engine computes the same in plain torch, which is what the tests run on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch.optim import Optimizer

from dcil import SparseNet, Update
from dcil.data import Batches
from dcil.engine.data_parallel import DataParallelEngine
from dcil.engine.eager import NO_SUMS, EagerEngine
from dcil.engine.evaluate import Scores
from dcil.engine.lock import PROCESS_LOCK
from dcil.engine.own_loop import Step, make_step
from dcil.engine.process_group import SINGLE_PROCESS, ProcessGroup
from dcil.engine.settings import EngineSettings
from dcil.engine.sharded import ShardedEngine, shard
from dcil.engine.step_settings import PLAIN, StepSettings
from dcil.engine.sync_batch_norm import synchronise_batch_norms
from dcil.errors import Diverged, UserError
from dcil.sharding import is_sharded

__all__ = [
    "PROCESS_LOCK",
    "Diverged",
    "EagerEngine",
    "Engine",
    "EngineSettings",
    "Scores",
    "Step",
    "StepSettings",
    "build",
    "make_step",
    "selection_kernel",
    "shard",
]


class Engine(Protocol):
    """What trains a network: ``name`` and ``settings`` go into the summary of a run."""

    name: str
    settings: EngineSettings

    def epoch(
        self, epoch: int, rate: Callable[[int], float], start: int = 0, sums: Sequence[float] = NO_SUMS
    ) -> Iterator[Update | None]:
        """Train through the epoch with learning rate ``rate(batch)``; yield each step's mask update, if any.

        An epoch that was left before batch ``start`` goes on there, with the ``sums`` that ``totals`` returned then.
        """

    def totals(self) -> tuple[float, float, float]:
        """Return the epoch's sum of the loss, hits and number of its targets so far: images, or tokens."""

    def synchronise(self) -> None:
        """Make equal in all processes what each tracks for itself, as a checkpoint has it."""

    def evaluate(self) -> dict[str, Scores]:
        """Return path -> its scores on the test data."""


def build(
    net: SparseNet,
    optimizer: Optimizer,
    loader: Batches,
    settings: EngineSettings,
    group: ProcessGroup = SINGLE_PROCESS,
    step_settings: StepSettings = PLAIN,
) -> Engine:
    """Return the engine for these settings; "auto" falls back to the eager one where the graph engine cannot train."""
    if not group.is_plain and settings.engine == "graph":
        raise UserError("--engine graph trains in one process: with --shard or under torchrun say --engine eager")
    if group.is_plain and loader.device.type == "cuda" and loader.device.index is not None:
        torch.cuda.set_device(loader.device)  # streams and graphs belong to the current one
    chosen = (settings if group.is_plain else replace(settings, engine="eager")).on(loader.device)
    reason = obstacle(net, chosen)
    if reason and (not group.is_plain or settings.engine == "graph" or settings.low_memory):
        raise UserError(f"these engine settings cannot train this network: {reason}")
    if chosen.engine == "graph" and not reason:
        from dcil.engine.cuda.graph import GraphEngine

        return GraphEngine(net, optimizer, loader, chosen, step_settings)
    chosen.apply()
    if group.shard:
        return ShardedEngine(net, optimizer, loader, chosen, group, step_settings)
    if group.world_size > 1 and not group.local_norms:
        synchronise_batch_norms(net, loader.device)
    if group.world_size > 1:
        return DataParallelEngine(net, optimizer, loader, chosen, group, step_settings)
    return EagerEngine(net, optimizer, loader, chosen, step_settings)


def obstacle(net: SparseNet, settings: EngineSettings) -> str | None:
    """Return why this network cannot be trained with these settings, None if it can."""
    if settings.low_memory and any(isinstance(m, torch.nn.modules.dropout._DropoutNd) and m.p for m in net.modules()):
        return "--low-memory runs a path twice, and dropout would differ between the two"
    if settings.engine == "eager":
        return None
    if any(map(is_sharded, net.parameters())):
        return "its parameters must not be sharded"
    if net.method.loss_key(net.steps_done) is None:
        return f"{type(net.method).__name__} overrides a hook without declaring its loss_key, so it is not recorded"
    return None


def selection_kernel() -> Callable[..., object] | None:
    """Return the kernel that prunes the smallest keys, for the benchmark; None without Triton."""
    from dcil.engine import kernels

    return kernels.select.keep_largest if kernels.AVAILABLE else None
