"""Export to the CPU runtime in int8: calibrated on images, with what it changes measured on others."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from dcil.errors import UserError
from dcil.export.plain import State
from dcil.export.program import quiet
from dcil.export.writer import Written
from dcil.runs.cost import entropy_bound
from dcil.runs.outputs import check_output, write_output

if TYPE_CHECKING:
    from dcil_runtime import Plan

#: Test images that top-1 is measured on, at most.
MOST_IMAGES = 10_000
#: Points of top-1 that int8 may cost before the export says so.
BOUND = 0.3


@dataclass(frozen=True)
class Change:
    """What int8 changes: top-1 in percent on ``images`` test images, and layers as they are named to people."""

    fp32: float
    int8: float
    images: int
    calibration: int
    worst: list[tuple[str, float]]  # the squared error of the outputs with this layer alone in int8, of their variance
    kept: list[str]  # layers in fp32
    layers: int

    def lines(self, bound: float) -> list[str]:
        """Return what is printed of it."""
        inside, kept = self.layers - len(self.kept), ", ".join(self.kept) or "none"
        costs = ", ".join(f"{name} {error:.1e}" for name, error in self.worst)
        lines = [
            f"top-1 {self.fp32:.2f} % in fp32, {self.int8:.2f} % in int8 ({self.int8 - self.fp32:+.2f} points) on "
            f"{self.images:,} test images, calibrated on {self.calibration:,}",
            f"layers that cost most, by the error of the outputs with each alone in int8: {costs}",
            f"layers in int8: {inside} of {self.layers}; in fp32: {kept}",
        ]
        if self.fp32 - self.int8 > bound:
            more = "calibrate on more images, or export fp32"
            lines.append(
                f"int8 costs {self.fp32 - self.int8:.2f} points of top-1, more than the bound of {bound} ({more})"
            )
        return lines


@torch.no_grad()
def export_int8(
    model: nn.Module,
    out: Path | str,
    images: Tensor,
    test: Iterable[tuple[Tensor, Tensor]],
    notes: Mapping[str, str] | None = None,
) -> tuple[Written, Change]:
    """Write a finalized ``model`` as a CPU plan in int8.

    images    a batch that ranges are calibrated on, and layers chosen that stay in fp32
    test      batches of images and labels, on which the change in top-1 is measured
    """
    from dcil.runtime import NativeMissing, PlanError  # needs the extra `cpu`

    check_output(Path(out))
    model, images = copy.deepcopy(model).cpu().eval(), images.detach().cpu().float()
    try:
        with quiet():
            return _export(model, Path(out), images, test, {key: str(value) for key, value in (notes or {}).items()})
    except (PlanError, NativeMissing) as error:
        raise UserError(str(error)) from None


def _export(
    model: nn.Module, out: Path, images: Tensor, test: Iterable[tuple[Tensor, Tensor]], notes: dict[str, str]
) -> tuple[Written, Change]:
    from dcil.runtime import Plan, load
    from dcil.runtime.lower import lower
    from dcil.runtime.quantize import layers_of
    from dcil.runtime.sensitivity import named, quantize
    from dcil_runtime import write

    network = lower(model, images[:1])
    if not layers_of(network):
        raise UserError("the network has no convolution or linear layer with weights: nothing computes with int8")
    found = quantize(network, images.contiguous().numpy())
    found.network.notes = {**notes, "dtype": "int8"}
    plans = [Plan(each, tune_seconds=0.2, max_memory=None, max_work=None) for each in (network, found.network)]
    one = images[:1].contiguous().numpy()

    def write_checked(draft: Path) -> None:
        write(found.network, draft)
        if not np.array_equal(load(draft, tune_seconds=0, max_memory=None, max_work=None)(one), plans[1](one)):
            raise UserError(f"{out} was not written: it computes something else when it is read back")

    write_output(out, write_checked)
    fp32, int8, count = _top1(plans, test)
    worst = [(named(network, k), found.errors[k]) for k in found.worst()]
    kept = [named(network, k) for k in found.kept]
    change = Change(fp32, int8, count, len(images), worst, kept, len(layers_of(network)))
    state: State = {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}
    dense = sum(4 * v.numel() if v.is_floating_point() else v.nbytes for v in state.values())
    error = float(np.abs(plans[0](one) - plans[1](one)).max())
    return Written(out, out.stat().st_size, dense, entropy_bound(state), error), change


def _top1(plans: list[Plan], test: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, float, int]:
    """Return the top-1 of two plans in percent, and on how many images."""
    right, count = np.zeros(2), 0
    for x, y in test:
        batch = x.detach().cpu().contiguous().numpy()
        right += [int((plan(batch).argmax(1) == y.cpu().numpy()).sum()) for plan in plans]
        count += len(batch)
        if count >= MOST_IMAGES:
            break
    if not count:
        raise UserError("no test images were given to measure top-1 on")
    return 100 * right[0] / count, 100 * right[1] / count, count
