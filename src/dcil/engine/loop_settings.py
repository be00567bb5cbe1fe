"""Settings of a training step of one's own, and the batch that it gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dcil import EMA, SparseNet
from dcil.engine.executor import Inputs, Outputs
from dcil.engine.recordable import dropout_obstacle
from dcil.errors import UserError, described
from dcil.task import Task
from dcil.validation import MOST, Validated


class Batch(NamedTuple):
    """What a step is called with."""

    inputs: Inputs
    target: Any
    valid: Tensor | None

    @property
    def targets(self) -> tuple[Any, Tensor | None]:
        """What the loss gets besides the outputs."""
        return self.target, self.valid


@dataclass(frozen=True)
class LoopSettings(Validated):
    """What ``make_step`` says of its arguments."""

    task: Task = F.cross_entropy
    logits: Callable[[Any], Tensor] | None = None
    autocast: torch.dtype | None = None
    scaler: Any = None
    clip_norm: float = 0.0
    accumulate: int = 1
    ema: EMA | None = None
    low_memory: bool = False
    record: bool | None = None
    compiler: str | None = "inductor"

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = self.autocast in (None, torch.bfloat16, torch.float16)
        self.require("autocast", allowed, "torch.bfloat16, torch.float16 or None")
        self.require("clip_norm", self.clip_norm >= 0, ">= 0", "0 clips nothing")
        self.require("accumulate", 1 <= self.accumulate <= MOST, ">= 1", "batches for each optimizer step")
        self.require("ema", self.ema is None or isinstance(self.ema, EMA), "a dcil.EMA or None")
        for name in ("scale", "step", "update", "unscale_") if self.scaler is not None else ():
            if not callable(getattr(self.scaler, name, None)):
                raise UserError(f"make_step: scaler must be a torch.amp.GradScaler, got {described(self.scaler)}")
        if not callable(self.task) or isinstance(self.task, type):
            raise UserError(f"make_step: task must be a function or a module, got {described(self.task)}")

    def _called(self, field: str) -> str:
        return f"make_step: {field}"

    def obstacle(self, net: SparseNet) -> str | None:
        """Return why nothing is to be recorded, as far as the settings tell; refuse those that cannot be right."""
        if self.low_memory and (reason := dropout_obstacle(net)):
            raise UserError(f"make_step: low_memory must be False: {reason}")
        if self.ema is not None and self.ema.source is not net:
            raise UserError("make_step: ema must be an average of the same net, got one of another")
        if self.record is False:
            return "record=False"
        if not net.first_mask.is_cuda and not self.record:
            return f"nothing is recorded on {net.first_mask.device.type}"
        if self.scaler is not None and net.state:
            return f"{type(net.method).__name__} observes gradients, which a GradScaler may skip"
        return None

    def autocasting(self, net: SparseNet) -> AbstractContextManager[Any]:
        """Return the autocast context of a step; None leaves that to a context around it."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(net.first_mask.device.type, self.autocast, cache_enabled=False)

    def loss(self, net: SparseNet, outputs: Outputs, targets: tuple[Any, Tensor | None]) -> Tensor:
        """Return the loss over all paths; ``targets`` are the target and what counts of it."""
        target, valid = targets
        return net.loss(outputs, target, self.task, self.logits, valid)

    def half(self, device: torch.device) -> torch.dtype | None:
        """Return what convolutions and matrix products compute in: as set here, or by a context around the step."""
        if self.autocast is not None or not torch.is_autocast_enabled(device.type):
            return self.autocast
        return torch.get_autocast_dtype(device.type)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return what the backward pass starts from."""
        loss = loss / self.accumulate if self.accumulate > 1 else loss
        return loss if self.scaler is None else self.scaler.scale(loss)

    def found_inf(self, optimizer: Optimizer) -> Tensor:
        """Return how many devices found infinite gradients, so that the scaler skipped the step."""
        found = self.scaler._found_inf_per_device(optimizer).values()
        total: Tensor = torch.stack([value.to(next(iter(found)).device) for value in found]).sum()
        return total

    @staticmethod
    def average(parallel: DistributedDataParallel, gradients: Sequence[Tensor]) -> None:
        """Average gradients over the processes, in place and in one all-reduce."""
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=parallel.process_group)
        flat /= dist.get_world_size(parallel.process_group)
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        torch._foreach_copy_(list(gradients), [p.view(g.shape) for p, g in zip(parts, gradients, strict=True)])
