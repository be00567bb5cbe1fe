"""Baselines: the same training steps in a plain torch loop, as a user would write them, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    return loop_step(model, mode, lambda out: F.cross_entropy(out, y), lambda optimizer: None, x)


def dcil_step(model: nn.Module, mode: str | None, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Return one step of the README's five lines, mask updates included."""
    net = SparseNet(model, DCIL(sparsity=0.95, steps=100_000, warmup=0.0)).train()
    return loop_step(net, mode, lambda out: net.loss(out, y), net.step, x)


def loop_step(
    net: nn.Module,
    mode: str | None,
    loss: Callable[[Any], Tensor],
    after_step: Callable[[torch.optim.SGD], object],
    x: Tensor,
) -> Callable[[], None]:
    """Return a step of ``net`` at ``x``, compiled in ``mode``, with the fastest SGD that torch has."""
    run = net if mode is None else torch.compile(net, mode=mode)
    optimizer = torch.optim.SGD(net.parameters(), 0.01, 0.9, weight_decay=1e-4, nesterov=True, fused=True)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with torch.autocast(x.device.type, torch.bfloat16):
            value = loss(run(x))
        optimizer.zero_grad(set_to_none=True)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        after_step(optimizer)

    return step
