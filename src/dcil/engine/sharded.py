"""Sharded training (FSDP2): each process holds its part of the weights, gradients, optimizer state and masks.

``fully_shard`` on every block of the network and on the network itself gathers the weights of a block where they are
needed. With precision bf16 weights are gathered, and gradients averaged, thus: bf16 weights, float32 gradients; the
weights that the optimizer updates, and masks are chosen by, stay float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dcil import SparseNet
from dcil.engine.data_parallel import DataParallelEngine
from dcil.engine.process_group import ProcessGroup
from dcil.engine.settings import EngineSettings
from dcil.engine.sync_batch_norm import synchronise_batch_norms
from dcil.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def shard(model: nn.Module, device: torch.device, settings: EngineSettings, group: ProcessGroup) -> nn.Module:
    """Shard a model over the processes, its weights as they are; the parts move to the device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--shard must train on cpu or cuda, got {device.type}: leave --shard out")
    if not group.local_norms:  # before it is sharded, since the layers are exchanged
        synchronise_batch_norms(model, device)
    mesh, policy = init_device_mesh(device.type, (group.world_size,)), policy_for(model, settings.on(device))
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model.to(device)  # the buffers


def policy_for(model: nn.Module, settings: EngineSettings) -> MixedPrecisionPolicy:
    """Return FSDP's mixed-precision policy: in which type weights are gathered and gradients averaged.

    Inputs and outputs keep the types that autocast gives them. Torch's batch norm takes no bf16 weight beside its
    float32 statistics, so networks that have one gather float32, and autocast computes in bf16.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if settings.precision != "bf16" or any(isinstance(m, _BatchNorm) for m in model.modules()):
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a model: what its outermost sequences are made of, where that has layers of its own."""
    for child in model.children():
        if isinstance(child, (nn.Sequential, nn.ModuleList)):
            yield from (block for block in child.children() if any(True for _ in block.children()))
        else:
            yield from blocks_of(child)


class ShardedEngine(DataParallelEngine):
    """The step of several processes on parts of the weights; FSDP averages the gradients as it shards them."""

    name = "sharded"

    def wrap(self, net: SparseNet) -> nn.Module:
        return net

    def average_weights(self) -> None: ...

    def check_masks(self) -> None:
        """Each process has its own part of them, and no copy to compare."""
