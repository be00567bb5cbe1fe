"""Time sparse inference on this CPU: dcil_runtime and every other engine installed, in turns in one run.

Ratios are to the fastest dense fp32 engine, and to the fastest dense INT8 engine, which ignores zeros too. INT8 is
calibrated on training images of a run (--calibrate) and then has its top-1 beside its speed; on noise without them.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import statistics
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dcil import models
from dcil.bench import token_networks
from dcil.bench.clock import in_turns, repeated_ms
from dcil.bench.engines import DENSE, INT8, QUANTIZED, SPARSE, Make, Run
from dcil.runs.environment import environment
from dcil.runs.outputs import write_output_text
from dcil.scope import ERK, Scope, Uniform
from dcil.weight import PrunableWeight


@dataclass(frozen=True)
class Case:
    """A network with one or more masks, a batch and a thread count. Dense engines run the first: they do not skip
    zeros."""

    name: str
    models: dict[str, nn.Module]  # by what its masks are called
    x: Tensor
    threads: int
    images: Tensor  # that INT8 is calibrated on
    test: tuple[Tensor, Tensor] | None = None  # images and labels, for top-1


@dataclass
class Timing:
    """Milliseconds per batch: the median of the rounds' medians, and the least of all, less affected by a busy machine.

    ``masks`` is empty for dense engines, ``error`` relative to torch, ``top1`` in percent; ``failed`` says why an
    engine did not run.
    """

    engine: str
    masks: str
    ms: float = float("nan")
    least: float = float("nan")
    rounds: list[float] = field(default_factory=list)
    error: float = float("nan")
    failed: str = ""
    top1: float | None = None


#: How random masks are spread over the convolutions.
SCOPES: dict[str, Scope] = {"uniform": Uniform(), "erk": ERK()}


def image_size(name: str) -> int:
    return 224 if name in ("resnet18", "resnet34", "resnet50") or name.endswith("-16") else 32


def input_shape(name: str) -> tuple[int, ...]:
    """Return the shape of an image, or of a sequence of tokens."""
    size = image_size(name)
    return (token_networks.LENGTH,) if token_networks.reads_tokens(name) else (3, size, size)


def inputs(shape: tuple[int, ...], batch: int) -> Tensor:
    """Return noise, or random tokens."""
    return token_networks.tokens(batch) if len(shape) == 1 else torch.randn(batch, *shape)


def built(name: str) -> nn.Module:
    if token_networks.reads_tokens(name):
        return token_networks.build(name)
    return models.build(name, 1000 if image_size(name) == 224 else 10)


def masked(name: str, masks: str, sparsity: float, seed: int = 0) -> nn.Module:
    """Return a new network with random masks, ``uniform`` or ``erk``, over convolutions; of transformers, over matrices
    too, but the classifier."""
    torch.manual_seed(seed)
    model = built(name).eval()
    kinds = (nn.Conv2d, nn.Linear) if token_networks.reads_tokens(name) or name.startswith("vit-") else (nn.Conv2d,)
    layers_of = [(part, module) for part, module in model.named_modules() if isinstance(module, kinds)]
    names = [f"{part}.weight" for part, module in layers_of if not part.endswith(("head", "classifier"))]
    layers = [PrunableWeight(name, model.get_parameter(name), torch.ones(0)) for name in names]
    shares = SCOPES[masks].sparsities(layers, sparsity)
    assert shares is not None
    for layer, share in zip(layers, shares, strict=True):
        weight, density = layer.weight.data, 1 - share
        kept = torch.rand(weight.numel()).argsort()[max(1, round(density * weight.numel())) :]
        weight.view(-1)[kept] = 0
        weight.div_(max(density, 1e-3) ** 0.5)
    return model


def measure(case: Case, engines: dict[str, Make], rounds: int) -> list[Timing]:
    """Time all engines in turns; one that does not run gets the reason instead of times."""
    torch.set_num_threads(case.threads)
    timings: list[Timing] = []
    runs: list[tuple[Timing, Run]] = []
    for name, make in engines.items():
        for masks in case.models if name in SPARSE else [next(iter(case.models))]:
            timings.append(Timing(name, masks if name in SPARSE else ""))
            try:
                runs.append((timings[-1], started(make, case, masks, timings[-1])))
            except Exception as error:  # an engine that is missing or broken may raise anything
                message = str(error).splitlines()[0][:80] if str(error) else ""
                timings[-1].failed = f"{type(error).__name__}: {message}"
    measured = in_turns({i: partial(repeated_ms, run) for i, (_, run) in enumerate(runs)}, rounds, warm_up=0)
    for i, (timing, _) in enumerate(runs):
        timing.rounds = [statistics.median(times) for times in measured[i]]
        timing.least = min(min(times) for times in measured[i])
        timing.ms = statistics.median(timing.rounds)
    return timings


def started(make: Make, case: Case, masks: str, timing: Timing) -> Run:
    """Build the engine and compare its first output with torch's."""
    with torch.no_grad():
        want = case.models[masks](case.x).numpy()
    run = make(case.models[masks], case.x, case.threads, case.images)
    timing.error = float(np.abs(np.asarray(run()) - want).max() / np.abs(want).max())
    if case.test is not None and timing.engine in QUANTIZED:
        timing.top1 = top1(run, case.test, len(case.x))
    elif case.test is not None:  # what an fp32 engine differs by changes no prediction
        with torch.no_grad():
            timing.top1 = top1(lambda x: case.models[masks](torch.from_numpy(x)).numpy(), case.test, len(case.x))
    return run


def top1(run: Run, test: tuple[Tensor, Tensor], batch: int) -> float:
    """Return top-1 in percent on the test images that fill whole batches."""
    images, labels = test[0].numpy(), test[1].numpy()
    starts = range(0, len(images) - batch + 1, batch)
    right = [np.asarray(run(images[i : i + batch])).argmax(1) == labels[i : i + batch] for i in starts]
    return 100 * float(np.concatenate(right).mean())


def best_dense(timings: Sequence[Timing], engines: Container[str] = DENSE) -> tuple[float, float]:
    """Return the median and the least time of the fastest dense engine, of fp32 or others."""
    ran = [t for t in timings if t.engine in engines and not t.failed]
    nothing = float("nan")
    return min((t.ms for t in ran), default=nothing), min((t.least for t in ran), default=nothing)


def run(
    cases: Sequence[Case], engines: Sequence[str], rounds: int, out: Path | None, show: bool = True
) -> list[dict[str, Any]]:
    """Measure every case and print its table; write everything to ``out`` as JSON."""
    console, every = Console(), {**SPARSE, **DENSE, **INT8}
    records: list[dict[str, Any]] = []
    for case in cases:
        timings = measure(case, {name: every[name] for name in engines}, rounds)
        if show:
            console.print(table_of(case, timings))
            for timing in (t for t in timings if t.failed):
                console.print(f"{timing.engine} {timing.masks} did not run: {timing.failed}", highlight=False)
        records.append(record_of(case, timings))
        if out:  # after every case: an interrupted run keeps the cases before
            write_output_text(out, json.dumps({"machine": machine(), "cases": records}, indent=1))
    return records


def machine() -> dict[str, Any]:
    """Return hardware, load, and the version of every engine that is installed."""
    from dcil.runtime import instruction_set  # needs the extra `cpu`

    versions = {}
    for package in ("torch", "onnxruntime", "openvino", "deepsparse"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    where = environment(torch.device("cpu"))
    return {**where, "kernels": instruction_set(), "load": os.getloadavg(), "versions": versions}


def table_of(case: Case, timings: Sequence[Timing]) -> Table:
    title = f"{case.name}, batch {len(case.x)}, {case.threads} thread{'s' * (case.threads > 1)}"
    caption = "x fp32, by least, x int8: times as fast as the best dense engine"
    table = Table(box=SIMPLE, padding=0, title=title, caption=caption)
    for column in ("engine", "masks", "ms", "least ms", "x fp32", "by least", "x int8", "error", "top-1"):
        table.add_column(column, no_wrap=True)
    best, best_least = best_dense(timings)
    int8, _ = best_dense(timings, INT8)
    for t in (t for t in timings if not t.failed):
        ratios = f"{best / t.ms:.2f}", f"{best_least / t.least:.2f}"
        score = "" if t.top1 is None else f"{t.top1:.2f}"
        table.add_row(
            t.engine, t.masks, f"{t.ms:.3f}", f"{t.least:.3f}", *ratios, f"{int8 / t.ms:.2f}", f"{t.error:.0e}", score
        )
    return table


def record_of(case: Case, timings: Sequence[Timing]) -> dict[str, Any]:
    (best, best_least), (int8, int8_least) = best_dense(timings), best_dense(timings, INT8)
    rows = []
    for t in timings:
        ratios = {"ratio": best / t.ms, "ratio_least": best_least / t.least}
        if int8 == int8:  # an int8 engine ran
            ratios |= {"ratio_int8": int8 / t.ms, "ratio_int8_least": int8_least / t.least}
        rows.append({**asdict(t), **({} if t.failed else ratios)})
    return {"network": case.name, "batch": len(case.x), "threads": case.threads, "best_dense_ms": best, "rows": rows}
