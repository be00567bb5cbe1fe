"""Time of 2:4 Linear layers of many sizes, dense and as torch's semi-structured tensors, in turns on one GPU.

Two times for each: "call" includes Python and the dispatch of torch's tensor subclass; "kernel" is the GPU's own time,
from a CUDA graph of many calls. Weights that fit stay in the GPU's cache in both forms. A form that this GPU or this
version of torch cannot run is listed with the reason; the others are measured.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rich.box import SIMPLE
from rich.table import Table
from torch import Tensor, nn

from dcil.bench.clock import Action, gpu_ms, in_turns
from dcil.errors import UserError
from dcil.export.semi import BACKENDS, to_semi_structured

#: Inputs and outputs of the layers: squares, then the feed-forward layers of ViT-B, ViT-L and a 7-8B language model.
SHAPES = [(n, n) for n in (256, 512, 1024, 2048, 4096, 8192)]
SHAPES += [(768, 3072), (3072, 768), (1024, 4096), (4096, 1024), (4096, 14336), (14336, 4096)]
BATCHES = (1, 16, 64, 512, 4096)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
CALLS = 20  # per timing
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
    """Return a Linear layer with two zeros in every four weights; the dense form computes with the zeros."""
    layer = nn.Linear(inputs, outputs, device=device, dtype=dtype).eval()
    groups = layer.weight.view(-1, 4)
    pairs = torch.tensor(list(itertools.combinations(range(4), 2)), device=device)
    groups.scatter_(1, pairs[torch.randint(len(pairs), (len(groups),), device=device)], 0)
    return layer


def _made(dense: nn.Linear, backend: str) -> nn.Module | str:
    """Return the layer converted for the backend, or the reason why it cannot be."""
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
    call = _medians_us({form: partial(gpu_ms, action, CALLS) for form, action in actions.items()}, rounds)
    kernel = _medians_us(_graphs(actions, notes), rounds)
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


def _graphs(actions: Mapping[str, Action], notes: dict[str, str]) -> dict[str, Callable[[], float]]:
    """Return clocks of CUDA graphs of the actions: the GPU's time alone. Notes 2:4 forms that cannot be recorded."""
    clocks: dict[str, Callable[[], float]] = {}
    for form, action in actions.items():
        try:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                for _ in range(CALLS):
                    action()
        except Exception as error:  # not every version of cuSPARSELt can be recorded
            if form == "dense":
                raise
            notes[form] = f"no CUDA graph: {_first_line(error)}"
            continue
        clocks[form] = partial(_replay_ms, graph)
    return clocks


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    return gpu_ms(graph.replay) / CALLS


def _medians_us(clocks: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Time the forms in turns; return their median microseconds."""
    return {form: 1000 * statistics.median(times) for form, times in in_turns(clocks, rounds).items()}


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
    """Say in sentences where 2:4 is faster and where not, and what could not run."""
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
