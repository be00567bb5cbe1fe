"""Where 2:4 pays: Linear layers of many sizes, dense and as torch's semi-structured tensors, in turns on one GPU.

Two times for each. "call" is what a caller waits for, the Python and the dispatch of torch's tensor subclass included;
"kernel" is the GPU's own time, from a CUDA graph of many calls. Weights that fit stay in the GPU's cache in both forms.
A form that this GPU or this torch cannot run is named with the reason and costs the others nothing.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.box import SIMPLE
from rich.table import Table
from torch import Tensor, nn

from dcil.errors import UserError
from dcil.export.semi import BACKENDS, to_semi_structured

Action = Callable[[], object]
#: Inputs and outputs of the layers: squares, then the feed-forward layers of ViT-B, ViT-L and a 7-8B language model.
SHAPES = [(n, n) for n in (256, 512, 1024, 2048, 4096, 8192)]
SHAPES += [(768, 3072), (3072, 768), (1024, 4096), (4096, 1024), (4096, 14336), (14336, 4096)]
BATCHES = (1, 16, 64, 512, 4096)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
PAYS = 1.05  #: times faster than dense; less is noise


@dataclass(frozen=True)
class SemiTiming:
    """One layer at one batch in one form; ``faster`` is dense over this, above 1 = 2:4 wins. Times in microseconds."""

    dtype: str
    inputs: int
    outputs: int
    batch: int
    form: str  # "dense", or the backend of the 2:4 form
    call_us: float | None
    kernel_us: float | None
    call_faster: float | None
    kernel_faster: float | None
    error: float | None  # largest difference to the dense layer's output, of the largest output
    note: str = ""


def measure_semi(
    shapes: Sequence[tuple[int, int]] = SHAPES,
    batches: Sequence[int] = BATCHES,
    rounds: int = 7,
    dtypes: Sequence[str] = ("fp16", "bf16"),
    backends: Sequence[str] = tuple(BACKENDS),
    device: str = "cuda",
) -> list[SemiTiming]:
    if not torch.cuda.is_available():
        raise UserError("2:4 runs on the sparse tensor cores of a GPU; there is none here")
    timings: list[SemiTiming] = []
    for dtype in dtypes:
        for inputs, outputs in shapes:
            dense = two_four_layer(inputs, outputs, DTYPES[dtype], device)
            made = {backend: _made(dense, backend) for backend in backends}
            for batch in batches:
                x = torch.randn(batch, inputs, device=device, dtype=DTYPES[dtype])
                timings += _compare(dense, made, x, dtype, rounds)
            del made
    return timings


@torch.no_grad()
def two_four_layer(inputs: int, outputs: int, dtype: torch.dtype, device: str) -> nn.Linear:
    """A Linear layer of which any two in four weights are 0; the dense form computes with the zeros."""
    layer = nn.Linear(inputs, outputs, device=device, dtype=dtype).eval()
    groups = layer.weight.view(-1, 4)
    pairs = torch.tensor(list(itertools.combinations(range(4), 2)), device=device)
    groups.scatter_(1, pairs[torch.randint(len(pairs), (len(groups),), device=device)], 0)
    return layer


def _made(dense: nn.Linear, backend: str) -> nn.Module | str:
    """The layer in that backend's form, or why there is none."""
    try:
        found = to_semi_structured(dense, backend)
    except Exception as error:  # whatever torch, cuSPARSELt or CUTLASS say about this GPU
        return _first_line(error)
    return found.model if found.converted else "; ".join(found.left.values())


def _compare(
    dense: nn.Linear, made: dict[str, nn.Module | str], x: Tensor, dtype: str, rounds: int
) -> list[SemiTiming]:
    notes = {form: why for form, why in made.items() if isinstance(why, str)}
    actions, errors = {"dense": _forward(dense, x)}, {"dense": 0.0}
    want = actions["dense"]().float()
    for form, model in made.items():
        if isinstance(model, str):
            continue
        try:
            errors[form] = float((_forward(model, x)().float() - want).abs().max() / want.abs().max())
            actions[form] = _forward(model, x)
        except Exception as error:  # the GPU or the shape is not supported
            notes[form] = _first_line(error)
    call = _medians({form: _events(action, 20) for form, action in actions.items()}, rounds)
    kernel = _medians(_graphs(actions, 20, notes), rounds)
    return [
        SemiTiming(
            dtype,
            dense.in_features,
            dense.out_features,
            len(x),
            form,
            call.get(form),
            kernel.get(form),
            call["dense"] / call[form] if form in call else None,
            kernel["dense"] / kernel[form] if form in kernel else None,
            errors.get(form),
            notes.get(form, ""),
        )
        for form in ("dense", *made)
    ]


def _forward(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.inference_mode():
            out: Tensor = model(x)
            return out

    return run


def _events(action: Action, calls: int) -> Callable[[], float]:
    """A function that runs ``calls`` of them and gives the microseconds of one."""

    def clock() -> float:
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        for _ in range(calls):
            action()
        end.record()
        end.synchronize()
        return 1000 * float(start.elapsed_time(end)) / calls

    return clock


def _graphs(actions: Mapping[str, Action], calls: int, notes: dict[str, str]) -> dict[str, Callable[[], float]]:
    """The same as CUDA graphs, so that only the GPU's time is left; the dense one must record, a 2:4 one may not."""
    clocks: dict[str, Callable[[], float]] = {}
    for form, action in actions.items():
        try:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                for _ in range(calls):
                    action()
        except Exception as error:  # not every version of cuSPARSELt can be recorded
            if form == "dense":
                raise
            notes[form] = f"no CUDA graph: {_first_line(error)}"
            continue
        replay = _events(graph.replay, 1)
        clocks[form] = lambda replay=replay: replay() / calls  # type: ignore[misc]
    return clocks


def _medians(clocks: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The forms take turns; one turn first that does not count."""
    took: dict[str, list[float]] = {form: [] for form in clocks}
    for _ in range(rounds + 1):
        for form, clock in clocks.items():
            took[form].append(clock())
    return {form: statistics.median(times[1:]) for form, times in took.items()}


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def semi_table(timings: Sequence[SemiTiming]) -> Table:
    out = Table(box=SIMPLE, padding=0)
    titles = ("layer", "batch", "type", "form", "call us", "kernel us", "call x", "kernel x", "error")
    for title in titles:
        out.add_column(title, no_wrap=True)
    for t in timings:
        if t.call_us is None:
            continue
        numbers = [t.call_us, t.kernel_us, t.call_faster, t.kernel_faster]
        shown = ["–" if n is None else f"{n:.1f}" if i < 2 else f"{n:.2f}" for i, n in enumerate(numbers)]
        off = "" if t.error is None else f"{t.error:.0e}"
        out.add_row(f"{t.inputs} -> {t.outputs}", str(t.batch), t.dtype, t.form, *shown, off)
    return out


def verdict(timings: Sequence[SemiTiming]) -> list[str]:
    """Where it pays and where not, and what could not be run, in sentences."""
    lines = []
    for form in dict.fromkeys(t.form for t in timings if t.form != "dense"):
        mine = [t for t in timings if t.form == form]
        for what in ("call", "kernel"):
            ratios = [(float(r), t) for t in mine if (r := getattr(t, f"{what}_faster")) is not None]
            if not ratios:
                continue
            pays = sum(r >= PAYS for r, _ in ratios)
            costs = sum(r <= 1 / PAYS for r, _ in ratios)
            ends = [max(ratios, key=lambda p: p[0]), min(ratios, key=lambda p: p[0])]
            best, worst = [f"{r:.2f} x ({t.inputs} -> {t.outputs}, batch {t.batch}, {t.dtype})" for r, t in ends]
            lines.append(
                f"{form}, {what} time: faster in {pays} of {len(ratios)} cases, slower in {costs}; "
                f"best {best}, worst {worst}"
            )
        notes = dict.fromkeys(t.note for t in mine if t.note)
        lines += [f"{form}: {note} ({sum(t.note == note for t in mine)} cases)" for note in notes]
    return lines
