"""Time the forms of a network: the dense, masked and compact one, in torch and in ONNX Runtime, in turns in one run.

Ratios are to the fastest dense form with the same threads and batch in the same run.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.table import Table
from torch import Tensor, nn

from dcil.bench.clock import Action, call_ms, in_turns
from dcil.export import compact
from dcil.export.onnx import session, write_onnx
from dcil.runs.cost import measure_cost


@dataclass(frozen=True)
class Timing:
    """One form under one setting: median and shortest time; ``ratio`` is the median over the best dense form's."""

    form: str
    device: str
    threads: int
    batch: int
    ms: float
    best_ms: float
    images_per_s: float
    ratio: float


@dataclass(frozen=True)
class Forms:
    """The networks, all on the CPU and in evaluation mode."""

    dense: nn.Module
    masked: nn.Module
    compact: nn.Module
    blocks: nn.Module  # the compact network in blocks of eight channels

    def counts(self, shape: Sequence[int]) -> dict[str, dict[str, int]]:
        """Return the parameters and multiply-adds of each form."""
        one = torch.zeros(1, *shape)
        costs = {name: measure_cost(model, one) for name, model in _networks(self)}
        return {name: {"parameters": cost.parameters, "macs": cost.macs} for name, cost in costs.items()}


def forms_of(dense: nn.Module, masked: nn.Module, shape: Sequence[int]) -> Forms:
    """Build the compact networks beside the two given ones."""
    one = torch.zeros(1, *shape)
    return Forms(dense.eval(), masked.eval(), compact(masked, one).model, compact(masked, one, block=8).model)


@torch.no_grad()
def prune_filters(model: nn.Module, sparsity: float, seed: int = 0) -> nn.Module:
    """Return a stand-in for a trained network: the weakest filters of every convolution 0, random norm statistics.

    With random statistics dead filters output constants, as after training, and the compact network has to add them.
    """
    random = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(model).eval()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            strength = module.weight.abs().flatten(1).mean(1)
            module.weight[strength.argsort()[: round(sparsity * len(strength))]] = 0
        if isinstance(module, nn.BatchNorm2d):
            for values, mean, spread in ((module.bias, 0.0, 0.3), (module.running_mean, 0.0, 0.3)):
                assert values is not None
                values.copy_(mean + spread * torch.randn(values.shape, generator=random))
    return model


@torch.no_grad()
def prune_weights(model: nn.Module, sparsity: float) -> nn.Module:
    """Return a copy with the weakest weights of every convolution 0."""
    model = copy.deepcopy(model).eval()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            flat = module.weight.view(-1)
            flat[flat.abs().argsort()[: round(sparsity * len(flat))]] = 0
    return model


def measure(
    forms: Forms, shape: Sequence[int], threads: Sequence[int], batches: Sequence[int], rounds: int, onnx: bool
) -> list[Timing]:
    """Time every form with every thread count and batch on the CPU, and on the GPU if there is one."""
    timings: list[Timing] = []
    with tempfile.TemporaryDirectory() as folder:
        files = _onnx_files(forms, shape, Path(folder)) if onnx else {}
        for count in threads:
            with _threads(count):
                for batch in batches:
                    x = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))
                    timings += _compare(_cpu_actions(forms, files, x, count), "cpu", count, batch, rounds)
    if torch.cuda.is_available():
        for batch in batches:
            x = torch.randn(batch, *shape, device="cuda")
            timings += _compare(_gpu_actions(forms, x), "cuda", 0, batch, rounds)
    return timings


def _compare(actions: dict[str, Action], device: str, threads: int, batch: int, rounds: int) -> list[Timing]:
    """Time the forms in turns, after two rounds that are not counted; medians over the rounds."""
    clocks = {form: partial(call_ms, action, torch.device(device)) for form, action in actions.items()}
    took = in_turns(clocks, rounds, warm_up=2)
    ms = {form: statistics.median(times) for form, times in took.items()}
    best = min(value for form, value in ms.items() if form.startswith("dense"))
    return [
        Timing(form, device, threads, batch, t, min(took[form]), 1000 * batch / t, t / best) for form, t in ms.items()
    ]


def _cpu_actions(forms: Forms, files: dict[str, Path], x: Tensor, threads: int) -> dict[str, Action]:
    actions: dict[str, Action] = {}
    last = x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
    for name, model in _networks(forms):
        actions[name] = _eager(model, x)
        if x.ndim == 4:
            swapped: Any = copy.deepcopy(model)
            actions[f"{name}, nhwc"] = _eager(swapped.to(memory_format=torch.channels_last), last)
    for name, file in files.items():
        run, feed = session(file, threads), {"input": x.numpy()}
        actions[f"{name}, ORT"] = lambda run=run, feed=feed: run.run(None, feed)  # type: ignore[misc]
    return actions


def _gpu_actions(forms: Forms, x: Tensor) -> dict[str, Action]:
    actions: dict[str, Action] = {}
    for name, model in _networks(forms):
        actions[name] = _eager(copy.deepcopy(model).cuda(), x)
        half: Any = copy.deepcopy(model).cuda().half()
        half.to(memory_format=torch.channels_last)
        actions[f"{name}, fp16 nhwc"] = _eager(half, x.half().contiguous(memory_format=torch.channels_last))
    return actions


def _networks(forms: Forms) -> list[tuple[str, nn.Module]]:
    return [
        ("dense", forms.dense),
        ("masked", forms.masked),
        ("compact", forms.compact),
        ("compact by 8", forms.blocks),
    ]


def _eager(model: nn.Module, x: Tensor) -> Action:
    def run() -> object:
        with torch.inference_mode():
            return model(x)

    return run


def _onnx_files(forms: Forms, shape: Sequence[int], folder: Path) -> dict[str, Path]:
    files = {name: folder / f"{name.replace(' ', '-')}.onnx" for name, _ in _networks(forms)}
    for name, model in _networks(forms):
        write_onnx(model, torch.zeros(2, *shape), files[name], {})
    return files


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def table(timings: Sequence[Timing]) -> Table:
    out = Table(box=SIMPLE, padding=0)
    for title in ("setting", "form", "ms", "best", "images/s", "x best dense"):
        out.add_column(title, no_wrap=True)
    before = None
    for t in timings:
        setting = f"{t.device}{f' x {t.threads}' if t.threads else ''}, batch {t.batch}"
        if before is not None and setting != before:
            out.add_section()
        numbers = (f"{t.ms:.2f}", f"{t.best_ms:.2f}", f"{t.images_per_s:,.0f}", f"{t.ratio:.3f}")
        out.add_row(setting if setting != before else "", t.form, *numbers)
        before = setting
    return out


def records(timings: Sequence[Timing]) -> list[dict[str, Any]]:
    return [asdict(timing) for timing in timings]
