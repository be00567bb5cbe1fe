"""A training loop of one's own, side by side: eager, torch.compile, with CUDA graphs, ``dcil.make_step``; `dcil train`.

The last is the same engine with its own batches, for the networks that ``bench.train`` has data for.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer

import dcil
from dcil import DCIL, Dense, Method, SparseNet, models
from dcil.bench import train
from dcil.bench.clock import call_ms, in_turns, median_ms, wait
from dcil.engine import EngineSettings
from dcil.runs.environment import environment
from dcil.runs.outputs import write_output_text

#: Name -> what torch.compile is asked for; None is eager. "reduce-overhead" replays CUDA graphs.
LOOPS: dict[str, str | None] = {"eager": None, "compile": "default", "compile + CUDA graphs": "reduce-overhead"}
OURS, LOW, ENGINE = "make_step", "make_step low memory", "dcil train"
ALL = (*LOOPS, OURS, LOW, ENGINE)
NONE = "\N{EN DASH}"
STEPS = 100_000  # of the schedule; timed in its middle, with the KL terms and mask updates on
PERIOD = 16  # steps between mask updates


@dataclass(frozen=True)
class Case:
    """One fixed batch: images of random pixels, or random tokens if there is a ``length``."""

    batch: int
    classes: int
    size: int = 0
    length: int = 0


CASES = {
    "resnet20": Case(128, 10, 32),
    "wrn-28-8": Case(128, 10, 32),
    "resnet50": Case(256, 1000, 224),
    "vit-s-16": Case(256, 1000, 224),
    "gpt-6-384": Case(64, 65, length=256),  # nanoGPT's for tiny Shakespeare, which has 65 characters
    "gpt-8-1024": Case(16, 65, length=512),  # 100.7 million prunable weights, for the share of the mask updates
    "gpt-20-2048": Case(8, 65, length=512),  # a billion of them, for the memory that one GPU needs
}


@dataclass(frozen=True)
class Row:
    """``ms`` is None, with the reason, where a loop could not be run; ``masks_ms`` is that of one mask update."""

    model: str
    method: str
    loop: str
    ms: float | None
    peak_gib: float
    prepare_seconds: float
    how: str = ""
    masks_ms: float | None = None


class Training(NamedTuple):
    """A step on one batch, mask updates included; what tells how it is computed; a mask update alone."""

    step: Callable[[], object]
    how: Callable[[], str] = str
    update: Callable[[], object] | None = None


def batch_of(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    if case.length:
        ids = torch.randint(case.classes, (case.batch, case.length), device=device)
        return ids, ids.roll(-1, 1)
    x = torch.randn(case.batch, 3, case.size, case.size, device=device).to(memory_format=torch.channels_last)
    return x, torch.randint(case.classes, (case.batch,), device=device)


def build(name: str, case: Case, device: torch.device) -> nn.Module:
    model = models.build(name, case.classes, size=case.length or case.size).to(device)
    return model if case.length else model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def optimizer_of(name: str, net: nn.Module) -> Optimizer:
    """Return the optimizer that such a network is usually trained with, in torch's fastest form."""
    if name.startswith(("gpt", "vit")):
        return torch.optim.AdamW(net.parameters(), 1e-4, weight_decay=0.1, fused=True)
    return torch.optim.SGD(net.parameters(), 0.01, 0.9, weight_decay=1e-4, nesterov=True, fused=True)


def task(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def method_of(name: str) -> Method:
    return Dense(steps=STEPS) if name == "dense" else DCIL(sparsity=0.95, steps=STEPS, warmup=0.0)


def make(name: str, method: str, loop: str, device: torch.device) -> Training:
    """Return this training in the middle of its schedule."""
    case = CASES[name]
    if loop == ENGINE:
        return engine_training(name, method, device)
    (x, y), model = batch_of(case, device), build(name, case, device)
    if method == "dense" and loop in LOOPS:  # as those train who have never heard of dcil
        return Training(torch_step(model, optimizer_of(name, model), task, lambda optimizer: None, LOOPS[loop], x, y))
    net = SparseNet(model, method_of(method)).train()
    net.set_extra_state(torch.tensor(STEPS // 2))
    optimizer = optimizer_of(name, net)
    update = None if method == "dense" else lambda: net.update_masks(optimizer)
    if loop in LOOPS:
        return Training(torch_step(net, optimizer, net.loss, net.step, LOOPS[loop], x, y), update=update)
    step = dcil.make_step(net, optimizer, autocast=torch.bfloat16, low_memory=loop == LOW)
    return Training(lambda: step(x, y), lambda: step.how, update)


def engine_training(name: str, method: str, device: torch.device) -> Training:
    """Return the steps of `dcil train` on random images, the making of batches included."""
    case = train.CASES[name]
    trainer = train.build(case, method, train.random_data(case), device, EngineSettings("graph", "bf16").on(device))

    def steps() -> Iterator[object]:
        while True:
            yield from trainer.engine.epoch(train.MIDDLE, lambda i: 0.01)

    endless = steps()
    return Training(lambda: next(endless), lambda: train.kind_of(trainer))


def torch_step(
    net: nn.Module,
    optimizer: Optimizer,
    loss: Callable[[Any, Tensor], Tensor],
    after_step: Callable[[Optimizer], object],
    mode: str | None,
    x: Tensor,
    y: Tensor,
) -> Callable[[], None]:
    """Return a step by hand, compiled in ``mode``."""
    run = net if mode is None else torch.compile(net, mode=mode)
    loss = loss if mode is None else torch.compile(loss)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with torch.autocast(x.device.type, torch.bfloat16):
            value = loss(run(x), y)
        optimizer.zero_grad(set_to_none=True)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        after_step(optimizer)

    return step


def measure(name: str, loop: str, device: torch.device, calls: int, rounds: int) -> list[Row]:
    """Time dense training and DCIL in turns, so that what else the machine does affects both; whatever a compiler
    stumbles over, the other is measured."""
    torch._dynamo.reset()
    prepared = {
        method: prepare(name, method, loop, device) for method in ("dense", "dcil") if offered(name, method, loop)
    }
    trainings = {method: training for method, (training, _) in prepared.items() if training is not None}

    failed: dict[str, str] = {}

    def clock(method: str) -> float:
        try:
            return math.nan if method in failed else call_ms(trainings[method].step, device, calls)
        except Exception as error:
            failed[method] = first_line(error)
            return math.nan

    with fastest(device):
        times = in_turns({method: partial(clock, method) for method in trainings}, rounds)
        updates = {m: t.update for m, t in trainings.items() if t.update is not None and m not in failed}
        masks = {method: median_ms(update, device, 2, rounds, 4) for method, update in updates.items()}
    rows = {method: row for method, (_, row) in prepared.items()}
    for method, ms in times.items():
        if method in failed:
            rows[method] = replace(rows[method], how=failed[method])
        else:
            how = trainings[method].how()
            rows[method] = replace(rows[method], ms=statistics.median(ms), how=how, masks_ms=masks.get(method))
    return list(rows.values())


def first_line(error: Exception) -> str:
    """Return what went wrong, in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def offered(name: str, method: str, loop: str) -> bool:
    """Return whether there is such a training: dense has one path anyway, and not every network has data."""
    return (method, loop) != ("dense", LOW) and (loop != ENGINE or name in train.CASES)


def prepare(name: str, method: str, loop: str, device: torch.device) -> tuple[Training | None, Row]:
    """Return this training after its first steps, and their memory, or None and why it cannot be had."""
    settle(device)
    on_gpu = device.type == "cuda"
    held = torch.cuda.memory_reserved() if on_gpu else 0  # by another training
    start = time.perf_counter()
    try:
        with fastest(device):
            training = make(name, method, loop, device)
            for _ in range(12 + 2 * PERIOD):
                training.step()
            wait(device)
    except Exception as error:
        return None, Row(name, method, loop, None, 0.0, 0.0, first_line(error))
    peak = torch.cuda.max_memory_reserved() - held if on_gpu else 0
    return training, Row(name, method, loop, None, peak / 2**30, time.perf_counter() - start)


@contextlib.contextmanager
def fastest(device: torch.device) -> Iterator[None]:
    """While open, torch chooses the fastest algorithms, for all loops alike; it says nothing of what it compiles."""
    before = torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32 = True, True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32 = before


def settle(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def run(names: Sequence[str], loops: Sequence[str], device: torch.device, out: Path, calls: int, rounds: int) -> None:
    """Measure, print, write after every loop."""
    console = Console()
    rows: list[Row] = []
    for name in names:
        for loop in loops:
            for row in measure(name, loop, device, calls, rounds):
                rows.append(row)
                said = row.how if row.ms is None else f"{row.ms:.3f} ms {row.how}"
                console.print(f"{name} {row.method} {loop}: {said}", highlight=False)
            found = {"environment": environment(device), "rows": [asdict(row) for row in rows]}
            write_output_text(out, json.dumps(found, indent=1) + "\n")
    console.print(table(rows))
    console.print("; ".join(f"{k} {v}" for k, v in environment(device).items()), highlight=False)
    console.print(f"written: {out}", highlight=False)


def table(rows: Sequence[Row]) -> Table:
    """Return ms per step, what DCIL costs beside dense training by the same loop, and the mask updates' part of it."""
    ours = {row.model: row.ms for row in rows if (row.method, row.loop) == ("dense", OURS)}
    found = Table("model", "loop", "dense", "DCIL", "DCIL / dense", "masks %", "peak GiB", title="ms per step")
    for name in dict.fromkeys(row.model for row in rows):
        for loop in dict.fromkeys(row.loop for row in rows):
            both = {row.method: row for row in rows if (row.model, row.loop) == (name, loop)}
            dense, dcil_ms = (both[method].ms if method in both else None for method in ("dense", "dcil"))
            base = ours.get(name) if loop == LOW else dense  # dense training has one path anyway
            texts = [NONE if ms is None else f"{ms:.3f}" for ms in (dense, dcil_ms)]
            ratio = f"{dcil_ms / base:.2f}" if dcil_ms and base else NONE
            masks = both["dcil"].masks_ms if dcil_ms else None
            share = f"{100 * masks / PERIOD / dcil_ms:.2f}" if masks and dcil_ms else NONE
            peak = " / ".join(f"{row.peak_gib:.1f}" for row in both.values())
            if both:
                found.add_row(name, loop, *texts, ratio, share, peak)
        found.add_section()
    return found
