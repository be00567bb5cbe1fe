"""Engines: what carries out the training steps. ``eager`` is the reference, ``graph`` the fast one on CUDA.

Reading order: eager, then graph, which needs flat (parameters in one tensor), route (how the paths run), fuse (the
rewritten network) with ops and weights, source (batches), sgd, record, moves and ranking (mask updates). The files
*_triton are kernels; without Triton, or on the CPU, plain torch does the same.
"""

from __future__ import annotations

import torch

from dcil import SparseNet
from dcil.data import Batches
from dcil.engine.cuda.capture import PROCESS_LOCK
from dcil.engine.cuda.graph import GraphEngine
from dcil.engine.eager import Diverged, EagerEngine
from dcil.engine.settings import EngineSettings
from dcil.errors import UserError

__all__ = ["PROCESS_LOCK", "Diverged", "EagerEngine", "Engine", "EngineSettings", "GraphEngine", "build"]

Engine = EagerEngine | GraphEngine


def build(net: SparseNet, optimizer: torch.optim.SGD, loader: Batches, speed: EngineSettings) -> Engine:
    """The engine asked for; "auto" takes the eager one for what the fast one cannot do."""
    if loader.device.type == "cuda" and loader.device.index is not None:
        torch.cuda.set_device(loader.device)  # streams and graphs belong to the current one
    wanted = speed.on(loader.device)
    reason = obstacle(net, wanted)
    if reason and (speed.engine == "graph" or speed.low_memory):
        raise UserError(f"this network cannot be trained so: {reason}")
    if wanted.engine == "graph" and not reason:
        return GraphEngine(net, optimizer, loader, wanted)
    wanted.apply()
    return EagerEngine(net, optimizer, loader, wanted)


def obstacle(net: SparseNet, speed: EngineSettings) -> str | None:
    """Why this network cannot be trained this way, if so."""
    if speed.low_memory and any(isinstance(m, torch.nn.modules.dropout._DropoutNd) and m.p for m in net.modules()):
        return "--low-memory runs a path twice, and dropout would differ between the two"
    if speed.engine == "eager":
        return None
    if any(p.dtype != torch.float32 for p in net.parameters()):
        return "its parameters must be float32"
    if net.method.loss_key(net.steps_done) is None:
        return f"{type(net.method).__name__} overrides a hook without declaring its loss_key, so it is not recorded"
    if not all(layer.weight.requires_grad for layer in net.layers):
        return "its prunable weights must all be trained"
    return None
