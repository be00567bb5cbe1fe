"""Choose how a network is trained: fused where it can be rewritten, else as it is, compiled."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcil import SparseNet
from dcil.engine import kernels
from dcil.engine.cuda.capture import restoring
from dcil.engine.cuda.flat import FlatParameters
from dcil.engine.cuda.fused_executor import FusedExecutor
from dcil.engine.cuda.path_executor import PathExecutor
from dcil.engine.cuda.rewrite import Unfusable, traced
from dcil.engine.cuda.updates import FlatUpdate, TorchUpdate, WeightUpdate
from dcil.engine.eager import autocast
from dcil.engine.executor import Executor, Inputs
from dcil.engine.settings import EngineSettings

NARROW = 64  # channels: up to here a network is bound by kernel launches, beyond by the GPU


def choose(
    net: SparseNet, optimizer: Optimizer, settings: EngineSettings, inputs: Inputs, diverged: Tensor
) -> tuple[Executor, WeightUpdate]:
    """Return what computes a step and what updates the weights; ``diverged`` is not 0 once a loss was not finite."""
    device, x = net.first_mask.device, inputs.only
    if x is not None and may_be_fused(net, settings, x):
        with restoring([*net.buffers()]):
            fused = choose_fused(net, optimizer, settings, x)
        if fused is not None:
            exact = settings.precision == "fp32"
            if is_plain_sgd(optimizer):
                return fused, FlatUpdate(optimizer, fused.flat, diverged, exact)  # type: ignore[arg-type]
            return fused, TorchUpdate(optimizer, device)
    compiles = settings.executor == "compiled" or (settings.executor == "auto" and device.type == "cuda")
    backend = settings.compiler if compiles else None
    return PathExecutor(net, backend, serial=settings.low_memory), TorchUpdate(optimizer, device)


def may_be_fused(net: SparseNet, settings: EngineSettings, x: Tensor) -> bool:
    """Return whether it is worth tracing the network: it has images, convolutions, and float32 weights, all trained."""
    if settings.executor in ("plain", "compiled") or (
        settings.executor == "auto" and x.is_cuda and not kernels.AVAILABLE
    ):
        return False  # without its kernels the fused network would be slower
    if x.dim() != 4 or not x.is_floating_point():
        return False
    if net.method.adds_gradient:  # to the weights, past the views whose gradients the fused network adds up
        return False
    trained = all(layer.weight.requires_grad for layer in net.layers)
    plain = all(p.dtype == torch.float32 and not p.is_sparse for p in net.parameters())
    return trained and plain and any(isinstance(m, nn.Conv2d) for m in net.model.modules())


def choose_fused(net: SparseNet, optimizer: Optimizer, settings: EngineSettings, x: Tensor) -> FusedExecutor | None:
    """Return the fused network, stacked or a stream per path; None if the model cannot be rewritten."""
    paths = tuple(net.method.paths)
    groups: list[list[tuple[str, ...]]] = [[(path,) for path in paths]]
    narrow = widest(net.model) <= NARROW
    # A narrow path is faster on its own stream, unless other runs share the GPU: then fewer launches count.
    stack = settings.executor == "stacked" or (settings.executor == "auto" and narrow and settings.shared_gpu)
    alike = len({net.method.share(path) for path in paths}) == 1
    if stack and alike and not settings.low_memory and len(paths) > 1:
        groups.insert(0, [paths])
    side_streams = not settings.shared_gpu and (narrow or len(paths) == 1)
    stem = not narrow and alike and not settings.low_memory and len(paths) > 1  # images are large there, launches few
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    try:
        model = traced(net.model, x)
    except Unfusable:
        return None
    flat = FlatParameters(net, optimizer, momentum=is_plain_sgd(optimizer))
    for group in groups:
        try:
            executor = FusedExecutor(
                net, flat, dtype, group, side_streams, serial=settings.low_memory, model=model, stem=stem
            )
        except Unfusable:
            continue
        if agrees(executor, net, settings, x):
            return executor
    return None


def is_plain_sgd(optimizer: Optimizer) -> bool:
    """Return whether the optimizer is the SGD that the kernel computes, with one group."""
    if type(optimizer) is not torch.optim.SGD or len(optimizer.param_groups) > 1:
        return False
    (group,) = optimizer.param_groups
    return not (group["dampening"] or group["maximize"] or group["differentiable"])


def widest(model: nn.Module) -> int:
    return max((m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d)), default=0)


@torch.no_grad()
def agrees(executor: FusedExecutor, net: SparseNet, settings: EngineSettings, x: Tensor) -> bool:
    """Return whether the fused network computes what the network computes, on the first batch."""
    with autocast(x.device, settings):
        want = net(x)
        try:
            executor.begin()
            got = executor.outputs(Inputs((x,)), net.method.paths, track=False)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError:  # shapes that do not match: a stack needs a convolution as its first operation
            return False
    if any(not isinstance(want[path], Tensor) or want[path].shape != got[path].shape for path in want):
        return False
    off = [float((got[p].float() - want[p].float()).norm() / want[p].float().norm()) for p in want]
    return max(off) < (0.1 if settings.precision == "bf16" else 0.01)
