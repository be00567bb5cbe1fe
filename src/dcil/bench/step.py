"""Time of a training step on the CPU: dense, DPF and DCIL in turns, and the share of the mask updates."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from dcil import DCIL, DPF, Dense, Method, SparseNet, models
from dcil.bench import loops
from dcil.bench.clock import call_ms, in_turns
from dcil.runs.environment import environment
from dcil.train.memory import keep_freed_memory

STEPS, F = 10_000, 16  # length of the schedule; steps between mask updates


def run(names: Sequence[str], batch: int, sequences: int, rounds: int) -> None:
    """Measure and print the table."""
    keep_freed_memory()  # as the trainer does
    console = Console()
    table = Table("model", "method", "ms / step", "x dense", "mask update ms", "masks % at F = 16")
    for model in names:
        case = loops.Case(sequences, 65, length=256) if models.reads_tokens(model) else loops.Case(batch, 10, 32)
        with loops.fastest(torch.device("cpu")):
            rows = compare(model, case, rounds)
        for row in rows:
            table.add_row(*row)
        table.add_section()
    console.print(table)
    console.print("; ".join(f"{k} {v}" for k, v in environment(torch.device("cpu")).items()), highlight=False)


def compare(model: str, case: loops.Case, rounds: int) -> list[tuple[str, ...]]:
    """Time the methods in turns; return the rows of the table, with means over the rounds."""
    methods: list[Method] = [Dense(), DPF(sparsity=0.95, steps=STEPS), DCIL(sparsity=0.95, steps=STEPS, warmup=0.0)]
    steps = [step_of(model, method, case) for method in methods]
    times = in_turns({pair: partial(step_and_update_ms, *pair) for pair in steps}, rounds)
    step_ms = [statistics.fmean(step for step, _ in times[pair]) for pair in steps]
    update_ms = [statistics.fmean(update for _, update in times[pair]) for pair in steps]
    rows: list[tuple[str, ...]] = []
    for method, step, update in zip(methods, step_ms, update_ms, strict=True):
        whole = step + update / F if method.prunes else step
        masks = (f"{update:.1f}", f"{100 * update / F / whole:.2f}") if method.prunes else ("", "")
        rows.append((model, type(method).__name__, f"{whole:.1f}", f"{whole / step_ms[0]:.3f}", *masks))
    return rows


def step_of(name: str, method: Method, case: loops.Case) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a training step without its mask update, and a mask update alone."""
    device = torch.device("cpu")
    x, y = loops.batch_of(case, device)
    net = SparseNet(loops.build(name, case, device), method).train()
    if not case.length:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # as the trainer does
    optimizer = loops.optimizer_of(name, net)
    net.set_extra_state(torch.tensor(STEPS // 2))  # halfway through the schedule

    def step() -> None:
        loss = net.loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def update() -> None:
        if method.prunes:
            net.update_masks(optimizer)

    update()
    return step, update


def step_and_update_ms(step: Callable[[], None], update: Callable[[], None]) -> tuple[float, float]:
    """Time one of each."""
    return call_ms(step), call_ms(update)
