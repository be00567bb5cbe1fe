"""Training on the GPU, side by side: methods, engines, whole epochs, peak memory, several runs at once, the masks."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dcil.bench.clock import median_ms, wait
from dcil.data import Dataset, Split
from dcil.engine import EngineSettings, selection_kernel
from dcil.engine.streams import new_stream
from dcil.runs.environment import environment
from dcil.runs.outputs import write_output_text
from dcil.selection import keep_largest, kth_smallest
from dcil.train import Config, Trainer

SELECT = 25_000_000
NONE = "\N{EN DASH}"
MIDDLE = 150  # the epoch to begin at: the sparsity grows, everything that can cost is switched on


@dataclass(frozen=True)
class Case:
    """Images of random pixels; enough steps for a time, or a whole epoch of the data set it stands for."""

    model: str
    batch: int
    size: int
    classes: int
    images: int
    tests: int


CASES = {
    "resnet20": Case("resnet20", 128, 32, 10, 50_000, 10_000),
    "resnet32": Case("resnet32", 128, 32, 10, 128 * 200, 10_000),
    "wrn-28-2": Case("wrn-28-2", 128, 32, 10, 128 * 100, 2_000),
    "wrn-28-8": Case("wrn-28-8", 128, 32, 10, 128 * 192, 2_000),
    "resnet50": Case("resnet50", 256, 224, 1000, 256 * 12, 256),
}


@dataclass(frozen=True)
class Row:
    """``share``: the part of each batch that the further paths compute."""

    model: str
    method: str
    share: float
    engine: str
    precision: str
    route: str
    ms_per_step: float
    epoch_seconds: float
    peak_gib: float
    prepare_seconds: float


def random_data(case: Case) -> Dataset:
    """Images of the right shape that nobody has to download."""
    generator = torch.Generator().manual_seed(0)

    def split(n: int) -> Split:
        images = torch.randint(256, (n, 3, case.size, case.size), dtype=torch.uint8, generator=generator)
        return Split(images, torch.randint(case.classes, (n,), generator=generator))

    pad = 4 if case.size <= 64 else 0
    return Dataset("random", split(case.images), split(case.tests), case.classes, (0.5,) * 3, (0.25,) * 3, pad, True)


def build(
    case: Case,
    method: str,
    dataset: Dataset,
    device: torch.device,
    speed: EngineSettings,
    seed: int = 0,
    share: float = 1.0,
) -> Trainer:
    """A trainer in the middle of its schedule."""
    settings = {"warmup": 0.0, "super_share": share} if method == "dcil" else {}
    config = Config(
        dataset="cifar10", model=case.model, method=method, epochs=300, target_epoch=225, milestones=(150, 225),
        batch=case.batch, lr=0.01, seed=seed, settings=settings,
    )  # fmt: skip
    trainer = Trainer.build(config, dataset, device, speed)
    trainer.net.set_extra_state(torch.tensor(MIDDLE * trainer.loader.steps))
    return trainer


def measure(
    case: Case, method: str, dataset: Dataset, device: torch.device, speed: EngineSettings, share: float = 1.0
) -> Row:
    """Prepare in a first epoch, then time the steps of a second one, then its evaluation."""
    settle(device)
    start = time.perf_counter()
    trainer = build(case, method, dataset, device, speed, share=share)
    limit = None if speed.engine == "graph" else 40  # the plain loop is slow: some steps say enough
    run_steps(trainer, MIDDLE, limit and 10)
    trainer.engine.evaluate()
    wait(device)
    prepared = time.perf_counter() - start
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    steps = run_steps(trainer, MIDDLE + 1, limit)
    wait(device)
    train_seconds = (time.perf_counter() - start) / steps * trainer.loader.steps
    start = time.perf_counter()
    trainer.measure()
    whole = train_seconds + time.perf_counter() - start
    peak = torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else 0.0
    kind = kind_of(trainer)
    kind = f"{kind}, low memory" if speed.low_memory else kind
    ms = 1000 * train_seconds / trainer.loader.steps
    return Row(case.model, method, share, trainer.engine.name, speed.precision, kind, ms, whole, peak, prepared)


def kind_of(trainer: Trainer) -> str:
    """Return which executor a trainer's engine has chosen."""
    executor = getattr(trainer.engine, "executor", None)
    programs = getattr(executor, "programs", None)
    kind = "-" if programs is None else "stacked" if any(len(g) > 1 for g in programs) else "streams"
    if type(executor).__name__ == "PathExecutor":
        kind = "compiled" if getattr(executor, "backend", None) else "plain"
    return kind


def run_steps(trainer: Trainer, epoch: int, limit: int | None) -> int:
    trainer.net.train()
    done = 0
    for _ in trainer.engine.epoch(epoch, lambda i: 0.01):
        done += 1
        if done == limit:
            break
    return done


def parallel(case: Case, dataset: Dataset, device: torch.device, speed: EngineSettings, runs: int) -> float:
    """ms per run and step of ``runs`` DCIL trainings in one process, each in its own thread and on its own stream."""
    settle(device)
    trainers = []
    for seed in range(runs):
        stream = new_stream(device)
        with torch.cuda.stream(stream):
            trainer = build(case, "dcil", dataset, device, speed, seed)
            run_steps(trainer, MIDDLE, trainer.loader.steps)
        trainers.append((stream, trainer))
    wait(device)

    def work(stream: torch.cuda.Stream, trainer: Trainer) -> None:
        with torch.cuda.stream(stream):
            run_steps(trainer, MIDDLE + 1, None)
            stream.synchronize()

    threads = [threading.Thread(target=work, args=pair) for pair in trainers]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1000 * (time.perf_counter() - start) / (runs * trainers[0][1].loader.steps)


def selection(device: torch.device) -> dict[str, float]:
    """ms of one exact selection over 25 million scores, and of torch's own k-th value."""
    scores = torch.randn(SELECT, device=device).square_()
    pruned = int(0.9 * SELECT)
    kept = int(keep_largest(scores, pruned).sum())
    assert kept == SELECT - pruned
    assert float(kth_smallest(scores, pruned)) == float(scores.sort().values[pruned - 1])
    kernel = selection_kernel()
    found = {} if kernel is None else {"engine_ms": engine_selection(kernel, scores, pruned)}
    return found | {
        "keep_largest_ms": median_ms(lambda: keep_largest(scores, pruned), device, 3, 10),
        "kthvalue_ms": median_ms(lambda: scores.kthvalue(pruned), device, 1, 3),
        "sort_ms": median_ms(lambda: scores.sort(), device, 1, 3),
    }


def engine_selection(kernel: Callable[..., object], scores: torch.Tensor, pruned: int) -> float:
    """Return the ms of the same selection as the engine does it, masks written."""
    keys, masks = scores.view(torch.int32), torch.ones_like(scores, dtype=torch.bool)
    place = torch.arange(len(keys), dtype=torch.int32, device=keys.device)
    k = torch.full((), pruned, device=keys.device)
    found = median_ms(lambda: kernel(keys, place, k, masks), keys.device, 3, 10)
    assert torch.equal(masks, keep_largest(scores, pruned))
    return found


def settle(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def plan(speeds: Sequence[EngineSettings], shares: Sequence[float]) -> list[tuple[str, EngineSettings, float]]:
    """Which method with which engine, and which share of each batch for DCIL's super net."""
    methods = [("dense", 1.0), ("dpf", 1.0), *(("dcil", share) for share in shares)]
    found = [(method, speed, share) for speed in speeds for method, share in methods]
    fast = [speed for speed in speeds if speed.engine == "graph"][:1]
    return found + [("dcil", replace(speed, low_memory=True), share) for speed in fast for share in shares]


def run(
    names: Sequence[str],
    runs: Sequence[int],
    shares: Sequence[float],
    engines: Sequence[str],
    precision: str,
    device: torch.device,
    out: Path,
) -> None:
    """Measure, print, write."""
    console = Console()
    speeds = [EngineSettings(engine, precision).on(device) for engine in engines]
    rows: list[Row] = []
    found: dict[str, Any] = {"environment": environment(device), "parallel": {}}
    for name in names:
        case = CASES[name]
        dataset = random_data(case)
        for method, speed, share in plan(speeds, shares):
            rows.append(measure(case, method, dataset, device, speed, share))
            row = rows[-1]
            console.print(f"{name} {called(row)} {row.engine} {row.route}: {row.ms_per_step:.3f} ms")
        if name == names[0] and device.type == "cuda" and runs:
            found["selection"] = selection(device)
            shared_gpu = {n: replace(speeds[-1], shared_gpu=n > 1) for n in runs}
            found["parallel"] = {n: parallel(case, dataset, device, shared_gpu[n], n) for n in runs}
        found["rows"] = [asdict(row) for row in rows]
        write_output_text(out, json.dumps(found, indent=1) + "\n")
    show(console, rows, found)
    console.print(f"written: {out}", highlight=False)


def called(row: Row) -> str:
    return row.method if row.share == 1 else f"{row.method}, share {row.share:g}"


def show(console: Console, rows: Sequence[Row], found: dict[str, Any]) -> None:
    table = Table("model", "engine", "paths", "method", "ms / step", "x dense", "s / epoch", "peak GiB")
    for row in rows:
        dense = next(r for r in rows if (r.model, r.engine, r.method) == (row.model, row.engine, "dense"))
        ratio = f"{row.ms_per_step / dense.ms_per_step:.2f}"
        numbers = (f"{row.ms_per_step:.3f}", ratio, f"{row.epoch_seconds:.3f}", f"{row.peak_gib:.2f}")
        table.add_row(row.model, f"{row.engine} {row.precision}", row.route, called(row), *numbers)
    console.print(table)
    for n, ms in found["parallel"].items():
        console.print(f"{n} DCIL runs at once: {ms:.3f} ms per run and step", highlight=False)
    if "selection" in found:
        ms = found["selection"].get("engine_ms", found["selection"]["keep_largest_ms"])
        console.print(f"masks over 25 M weights: {ms:.2f} ms, every 16th step")
    console.print("; ".join(f"{k} {v}" for k, v in found["environment"].items()), highlight=False)
