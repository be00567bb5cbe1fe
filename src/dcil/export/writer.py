"""Write a network in one of the formats; the file appears under its name once it is checked."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dcil import SparseNet
from dcil.errors import UserError
from dcil.export.compact.shrink import compact
from dcil.export.formats import BLOCKS, DTYPES, FORMATS, PROGRAMS, check_options
from dcil.export.plain import State
from dcil.export.verify import Inputs, alike, computed, distance, inputs_of, one_more, reason, size_of
from dcil.runs.cost import entropy_bound
from dcil.runs.outputs import check_output, write_output


@dataclass(frozen=True)
class Written:
    """Result of an export, in bytes; ``error`` is the largest difference of an output, None where it was not run."""

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
    notes: Mapping[str, str] | None = None,
    example: Tensor | Inputs | None = None,
    *,
    dtype: str | None = None,
    small: bool = False,
    block: int | None = None,
) -> Written:
    """Write a finalized ``model`` in the format ``to``; the file appears only if the check finds it equal.

    example    a batch of inputs (several in a tuple), needed by programs, and used to report what ``dtype`` costs
    dtype      "fp16" or "bf16": weights of at least two dimensions in that precision (state formats)
    small      the compact network instead of the masked one ("onnx"; "compact" always is)
    block      of the compact network, see `compact`; default: 1 for "compact", 8 for "onnx", which needs it for speed
    """
    out, compacts = Path(out), small or to == "compact"
    check_options(to, dtype, small, block)
    check_output(out)
    if not isinstance(model, nn.Module) or isinstance(model, SparseNet):
        what = "its finalize() gives the network" if isinstance(model, SparseNet) else "no network"
        raise UserError(f"{type(model).__name__} cannot be exported: {what}")
    inputs = None if example is None else inputs_of(example)
    if to in PROGRAMS and inputs is None:
        raise UserError(f"{to} needs an example input: give example=x, a batch that the network takes")
    model, notes = copy.deepcopy(model).cpu().eval(), {str(key): str(value) for key, value in (notes or {}).items()}
    state = _state(model, DTYPES[dtype or "fp32"])
    error = None
    if to in PROGRAMS:
        assert inputs is not None
        if compacts:
            computed(model, inputs)  # refuses a network that does not run
        source = compact(model, inputs, BLOCKS[to] if block is None else block).model if compacts else model
        error = _write_program(model, source, to, out, notes, inputs)
    else:
        if inputs is not None:
            error = distance(computed(_loaded(model, state), inputs), computed(model, inputs))
        _write_state(state, to, out, notes)
    dense = sum(4 * v.numel() if v.is_floating_point() else v.nbytes for v in state.values())
    return Written(out, out.stat().st_size, dense, entropy_bound(state), error)


def _state(model: nn.Module, dtype: torch.dtype) -> State:
    """Return the tensors to write: clones, because tied weights share memory and safetensors refuses that."""
    state: State = {}
    for key, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise UserError(f"{key} is no tensor ({type(value).__name__}); no format holds it")
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
    if not state:
        raise UserError("the network holds no tensor at all")

    def write_checked(draft: Path) -> None:
        write(state, draft, notes)
        back = read(draft)
        wrong = [key for key in state if key not in back or not _same(state[key], back[key])]
        if wrong or len(back) != len(state):
            raise UserError(f"{out} was not written: {to} gave back something else for {wrong[:3] or 'its keys'}")

    write_output(out, write_checked)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(alike(a, b).all())


def _write_program(
    model: nn.Module, source: nn.Module, to: str, out: Path, notes: dict[str, str], inputs: Inputs
) -> float:
    write, run, tolerance = PROGRAMS[to]
    # Two inputs at least, because torch.export takes a batch of one for a fixed size; one more than that is the test.
    least = 1 if to == "cpu" else 2
    batch = tuple(torch.cat([x, x])[: max(least, len(x))] for x in inputs)
    error, want = 0.0, computed(model, one_more(batch))
    count = len(one_more(batch)[0])
    if to == "cpu" and all(y.ndim and len(y) == count for y in want):
        # A plan knows no batch: it would be wrong for a network that asks for its size.
        items = [computed(model, tuple(x[i : i + 1] for x in one_more(batch))) for i in range(count)]
        alone = [torch.cat(outputs) for outputs in zip(*items, strict=True)]
        if not distance(alone, want) <= tolerance * size_of(want):
            raise UserError(f"{out} was not written: the network does not treat one image as it treats several")

    def write_checked(draft: Path) -> None:
        nonlocal error
        try:
            write(source, batch, draft, notes)
            found = run(draft, one_more(batch))
        except (UserError, OSError):
            raise
        except Exception as wrong:  # torch's exporters and the engines raise whatever they like
            raise UserError(f"{out} was not written: {to} cannot hold this network ({reason(wrong)})") from None
        error = distance(found, want)
        if not error <= tolerance * size_of(want):
            raise UserError(f"{out} was not written: {to} computes something else, by up to {error:.1e}")

    write_output(out, write_checked)
    return error


def _loaded(model: nn.Module, state: State) -> nn.Module:
    copied = copy.deepcopy(model)
    copied.load_state_dict(state)
    return copied
