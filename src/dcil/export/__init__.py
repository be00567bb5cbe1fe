"""A finished network as a file for somebody else, checked before it gets its name.

Two families. A state format holds tensors and is checked by reading them back: they must be equal. A program format
holds a network that runs by itself and is checked by running it: it must compute what the source network computes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dcil.errors import UserError, unknown
from dcil.export.carry import carry_optimizer
from dcil.export.cpu import run_cpu, write_cpu
from dcil.export.onnx import run_onnx, write_onnx
from dcil.export.pieces import Cut
from dcil.export.plain import State, read_torch, write_safetensors, write_torch
from dcil.export.program import run_program, write_program
from dcil.export.semi import SemiStructured, load_semi, read_semi, to_semi_structured, write_semi
from dcil.export.shrink import Compact, compact
from dcil.export.sparse import entropy_bound, load_sparse, read_sparse, write_sparse
from dcil.train.files import write_whole

__all__ = [
    "BLOCKS",
    "DTYPES",
    "FORMATS",
    "PROGRAMS",
    "Compact",
    "Cut",
    "SemiStructured",
    "Written",
    "carry_optimizer",
    "compact",
    "export",
    "load_semi",
    "load_sparse",
    "read_semi",
    "read_sparse",
    "read_torch",
    "to_semi_structured",
]

#: State format -> how it is written and read back.
FORMATS: dict[str, tuple[Callable[[State, Path, dict[str, str]], None], Callable[[Path], State]]] = {
    "safetensors": (write_safetensors, load_file),
    "torch": (write_torch, read_torch),
    "sparse": (write_sparse, read_sparse),
    "semi-structured": (write_semi, read_semi),
}
Write = Callable[[nn.Module, Tensor, Path, dict[str, str]], None]
#: Program format -> how it is written, how it is run, and how far its outputs may be from the source's.
PROGRAMS: dict[str, tuple[Write, Callable[[Path, Tensor], Tensor], float]] = {
    "compact": (write_program, run_program, 1e-5),
    "onnx": (write_onnx, run_onnx, 1e-4),
    "cpu": (write_cpu, run_cpu, 1e-5),
}
#: Program format -> the block of its compact networks.
BLOCKS = {"compact": 1, "onnx": 8, "cpu": 1}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Written:
    """What came of an export, in bytes; ``error`` is the largest difference of an output, None where it was not run."""

    file: Path
    size: int
    dense: int  # the same network's tensors in full, fp32
    bound: int  # values and masks at their entropy, in the file's precision
    error: float | None


@torch.no_grad()
def export(
    model: nn.Module,
    to: str,
    out: Path | str,
    notes: dict[str, str] | None = None,
    example: Tensor | None = None,
    *,
    dtype: str | None = None,
    small: bool = False,
    block: int | None = None,
) -> Written:
    """Write a finalized ``model`` in the format ``to``; the file appears only if it proves equal.

    example    a batch of inputs, needed by the program formats and used to report what ``dtype`` costs
    dtype      "fp16" or "bf16": weights of at least two dimensions in that precision (state formats)
    small      the compact network instead of the masked one ("onnx"; "compact" always is)
    block      of the compact network, see `compact`; default: 1 for "compact", 8 for "onnx", which needs it for speed
    """
    if to not in FORMATS and to not in PROGRAMS:
        raise unknown("export format", to, [*FORMATS, *PROGRAMS])
    if dtype is not None and dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    if small and to not in PROGRAMS:
        raise UserError(f"{to} has no compact form; allowed: {', '.join(PROGRAMS)}")
    model, out, notes = copy.deepcopy(model).cpu().eval(), Path(out), notes or {}
    example = None if example is None else example.detach().cpu()
    state = _state(model, DTYPES[dtype or "fp32"])
    if to in FORMATS:
        _write_state(state, to, out, notes)
        error = None if example is None else _distance(_loaded(model, state)(example), model(example))
    elif example is None:
        raise UserError(f"{to} needs an example input")
    elif dtype not in (None, "fp32"):
        raise UserError(f"{to} is written in fp32 only; {dtype} goes with {', '.join(FORMATS)}")
    else:
        error = _write_program(model, _source(model, to, example, small, block), to, out, notes, example)
    dense = sum(4 * v.numel() if v.is_floating_point() else v.nbytes for v in state.values())
    return Written(out, out.stat().st_size, dense, entropy_bound(state), error)


def _state(model: nn.Module, dtype: torch.dtype) -> State:
    """The tensors to write. Clones, because tied weights share memory and safetensors refuses that."""
    state: State = {}
    for key, value in model.state_dict().items():
        state[key] = value.detach().contiguous().clone()
        # Norm layers and biases are small and their statistics wide: they stay as they are.
        if dtype is not torch.float32 and value.is_floating_point() and value.ndim > 1:
            state[key] = state[key].to(dtype)
            if not bool(state[key].isfinite().all()) and bool(value.isfinite().all()):
                raise UserError(
                    f"{key} holds numbers that {str(dtype).removeprefix('torch.')} does not reach; use bf16"
                )
    return state


def _write_state(state: State, to: str, out: Path, notes: dict[str, str]) -> None:
    write, read = FORMATS[to]

    def write_checked(draft: Path) -> None:
        write(state, draft, notes)
        back = read(draft)
        wrong = [key for key in state if key not in back or not _same(state[key], back[key])]
        if wrong or len(back) != len(state):
            raise UserError(f"{out} was not written: {to} gave back something else for {wrong[:3] or 'its keys'}")

    write_whole(out, write_checked)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def _source(model: nn.Module, to: str, example: Tensor, small: bool, block: int | None) -> nn.Module:
    """The network that a program is made from."""
    if to != "compact" and not small:
        return model
    return compact(model, example, BLOCKS[to] if block is None else block).model


def _write_program(
    model: nn.Module, source: nn.Module, to: str, out: Path, notes: dict[str, str], example: Tensor
) -> float:
    write, run, tolerance = PROGRAMS[to]
    # Two inputs at least, because torch.export takes a batch of one for a fixed size; one more than that is the test.
    batch = torch.cat([example, example])[: max(2, len(example))]
    error = 0.0

    def write_checked(draft: Path) -> None:
        nonlocal error
        write(source, batch, draft, notes)
        inputs = torch.cat([batch, torch.randn(1, *batch.shape[1:], generator=torch.Generator().manual_seed(0))])
        want = model(inputs)
        error = _distance(run(draft, inputs), want)
        if not error <= tolerance * max(1.0, float(want.abs().max())):
            raise UserError(f"{out} was not written: {to} computes something else, by up to {error:.1e}")

    write_whole(out, write_checked)
    return error


def _loaded(model: nn.Module, state: State) -> nn.Module:
    copied = copy.deepcopy(model)
    copied.load_state_dict(state)
    return copied


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.shape == b.shape else float("nan")
