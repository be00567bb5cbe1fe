"""Baselines: the same training steps in a plain torch loop, as a user would write them, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcil import DCIL, SparseNet, models
from dcil.bench.clock import median_ms

#: Name -> what torch.compile is asked for; None is eager. "reduce-overhead" replays CUDA graphs.
LOOPS: dict[str, str | None] = {"eager": None, "compile": "default", "compile + CUDA graphs": "reduce-overhead"}


def own_loop_ms(
    model: str, classes: int, batch: int, size: int, device: torch.device, calls: int = 20
) -> dict[str, dict[str, float | None]]:
    """Return {method: {loop: ms per step}} of dense training and DCIL: bf16 autocast, channels_last, fused SGD, one
    fixed batch. None: torch could not run that loop."""
    x = torch.randn(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(classes, (batch,), device=device)

    def fresh() -> nn.Module:
        return models.build(model, classes).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    makers = {"dense": dense_step, "dcil": dcil_step}
    found: dict[str, dict[str, float | None]] = {}
    for method, make in makers.items():
        found[method] = {}
        for loop, mode in LOOPS.items():
            torch._dynamo.reset()
            try:
                step = make(fresh(), mode, x, y)
                found[method][loop] = median_ms(step, device, warm_up=12, rounds=5, calls=calls)
            except Exception:  # whatever a compiler stumbles over, the other loops are measured
                found[method][loop] = None
    return found


def dense_step(model: nn.Module, mode: str | None, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Return one step of dense training."""
    run = model if mode is None else torch.compile(model, mode=mode)
    optimizer = fused_sgd(model)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with torch.autocast(x.device.type, torch.bfloat16):
            loss = F.cross_entropy(run(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def dcil_step(model: nn.Module, mode: str | None, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Return one step of the README's five lines, mask updates included."""
    net = SparseNet(model, DCIL(sparsity=0.95, steps=100_000, warmup=0.0)).train()
    run = net if mode is None else torch.compile(net, mode=mode)
    optimizer = fused_sgd(net)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with torch.autocast(x.device.type, torch.bfloat16):
            loss = net.loss(run(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        net.step(optimizer)

    return step


def fused_sgd(module: nn.Module) -> torch.optim.SGD:
    """Return the fastest SGD that torch has."""
    return torch.optim.SGD(module.parameters(), 0.01, 0.9, weight_decay=1e-4, nesterov=True, fused=True)
