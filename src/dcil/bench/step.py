"""What a training step costs, dense, DPF and DCIL side by side, and the mask updates' share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table

from dcil import DCIL, DPF, Dense, Method, SparseNet, models
from dcil.runs.environment import environment
from dcil.train.memory import keep_freed_memory

STEPS, F = 10_000, 16


def run(names: Sequence[str], batch: int, rounds: int) -> None:
    """Measure and print."""
    keep_freed_memory()  # as the trainer does
    console = Console()
    table = Table("model", "method", "ms / step", "x dense", "mask update ms", "masks % at F = 16")
    for model in names:
        for row in compare(model, batch, rounds):
            table.add_row(*row)
        table.add_section()
    console.print(table)
    console.print("; ".join(f"{k} {v}" for k, v in environment(torch.device("cpu")).items()), highlight=False)


def compare(model: str, batch: int, rounds: int) -> list[tuple[str, ...]]:
    """The methods take turns, so that whatever else the machine does hits all of them; means over the rounds."""
    methods: list[Method] = [Dense(), DPF(sparsity=0.95, steps=STEPS), DCIL(sparsity=0.95, steps=STEPS, warmup=0.0)]
    x = torch.randn(batch, 3, 32, 32).to(memory_format=torch.channels_last)
    steps = [step_of(model, method, x, torch.randint(10, (batch,))) for method in methods]
    # The first round warms up.
    times = [[(clock(step), clock(move)) for step, move in steps] for _ in range(rounds + 1)]
    step_ms = [statistics.fmean(took[i][0] for took in times[1:]) for i in range(len(methods))]
    move_ms = [statistics.fmean(took[i][1] for took in times[1:]) for i in range(len(methods))]
    rows: list[tuple[str, ...]] = []
    for method, step, move in zip(methods, step_ms, move_ms, strict=True):
        whole = step + move / F if method.prunes else step
        masks = (f"{move:.1f}", f"{100 * move / F / whole:.2f}") if method.prunes else ("", "")
        rows.append((model, type(method).__name__, f"{whole:.1f}", f"{whole / step_ms[0]:.3f}", *masks))
    return rows


def step_of(
    model: str, method: Method, x: torch.Tensor, y: torch.Tensor
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A training step without its mask update, and a mask update alone."""
    torch.manual_seed(0)
    net = SparseNet(models.build(model), method).train()
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # as the trainer does
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4)

    net.set_extra_state(torch.tensor(STEPS // 2))  # halfway through the schedule

    def step() -> None:
        loss = net.loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def move() -> None:
        if method.prunes:
            net.update_masks(optimizer)

    move()
    return step, move


def clock(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - start)
