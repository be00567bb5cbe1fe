"""Mask probe: accuracy around mask updates, and the lifetimes of revived weights, observed during training.

The probe changes nothing in the training, and synchronises with the device only in `observations`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dcil import SparseNet, Update
from dcil.data import Batches
from dcil.engine import PROCESS_LOCK, EngineSettings
from dcil.engine.eager import autocast
from dcil.engine.evaluate import Evaluation, large_test_batches
from dcil.reproduce.record_fields import LIFETIMES, OBSERVED
from dcil.runs.damage import CONTENT_ERRORS, naming_file
from dcil.runs.json_file import parse_object
from dcil.runs.position import START, Position
from dcil.runs.tensors import write_tensors

EVERY = 5  # epochs between updates whose effect on the accuracy is measured: two evaluations each
EDGES = LIFETIMES[1:]
NEVER = -1
#: What reading a file of the probe raises when it was altered or cut short.
FILE_ERRORS = (SafetensorError, RuntimeError, *CONTENT_ERRORS)


class MaskProbe:
    """Observes every mask update of a network.

    ``revived_at`` holds for every weight the step at which it was last revived, or NEVER. A lifetime lasts from
    there to the step that drops the weight again.
    """

    def __init__(self, net: SparseNet, loader: Batches, settings: EngineSettings) -> None:
        self.net, self.loader, self.settings = net, loader, settings
        self.revived_at = torch.full_like(self.masks(), NEVER, dtype=torch.int32)
        self.lifetimes = torch.zeros(len(EDGES) + 1, dtype=torch.long, device=self.revived_at.device)
        self.edges = torch.tensor(EDGES, dtype=torch.int32, device=self.revived_at.device)
        self.steps_stayed = torch.zeros((), dtype=torch.double, device=self.revived_at.device)
        self.changes: list[tuple[int, int, Tensor]] = []  # epoch, step, top-1 (before, after)
        self.complete = True  # observed since the first step
        self.chosen: int | None = None
        self.last_masks: Tensor | None = None  # after the last update
        self.epoch = 0
        self._before: Tensor | None = None  # top-1 before the chosen update
        net.add_observer(self)

    def begin(self, epoch: int, steps: int) -> None:
        """Choose the update to measure in epoch ``epoch`` (from 0) of ``steps`` steps, if any.

        It is in the middle of the epoch: the first may also prune more, since the sparsity grows by epoch.
        """
        self.epoch, self.chosen = epoch + 1, None
        if (epoch + 1) % EVERY == 0:
            now = self.net.steps_done
            due = [step for step in range(now + 1, now + steps + 1) if self.net.method.due(step)]
            self.chosen = due[len(due) // 2] if due else None

    @torch.no_grad()
    def before_update(self, step: int) -> None:
        """Keep the masks and, at the chosen update, the accuracy with them."""
        self.last_masks = self.masks() if self.last_masks is None else self.last_masks  # nothing else changes masks
        self._before = top1(self.net, self.loader, self.settings) if step == self.chosen else None

    @torch.no_grad()
    def after_update(self, update: Update) -> None:
        """Compare with the masks before, and with the accuracy where it was measured."""
        if self._before is not None:
            after = top1(self.net, self.loader, self.settings)
            self.changes.append((self.epoch, update.step, torch.stack([self._before, after])))
        assert self.last_masks is not None
        old, self.last_masks = self.last_masks, self.masks()
        self.count(old, self.last_masks, update.step)

    def count(self, old: Tensor, new: Tensor, step: int) -> None:
        """Count the lifetimes that end with this update, and begin those of revived weights."""
        ended = old & ~new & (self.revived_at != NEVER)
        lifetime = step - self.revived_at
        self.lifetimes.index_add_(0, torch.bucketize(lifetime, self.edges, right=True), ended.long())
        self.steps_stayed += (lifetime * ended).sum()
        self.revived_at.copy_(torch.where(new, torch.where(old, self.revived_at, step), NEVER))

    def masks(self) -> Tensor:
        return torch.cat([mask.flatten() for mask in self.net.masks.values()])

    def observations(self) -> dict[str, Any]:
        """Return what was observed (waits for the device)."""
        return {
            "looks": [[epoch, step, *(round(v, 4) for v in pair.tolist())] for epoch, step, pair in self.changes],
            "stays": None
            if not self.complete
            else {
                "at_least": LIFETIMES,
                "ended": self.lifetimes.tolist(),
                "steps_stayed": self.steps_stayed.item(),
                "still_there": int((self.revived_at != NEVER).sum()),
            },
        }

    # -- saved and restored with the checkpoints of a run ---------------------------------------------------------

    def save(self, folder: Path, epoch: int) -> None:
        """Write the state before the checkpoint of the same epoch; the previous file is kept, so one always fits it."""
        tensors = {
            "born": self.revived_at.cpu(),
            "stays": self.lifetimes.cpu(),
            "steps_stayed": self.steps_stayed.cpu(),
        }
        header = {"found": json.dumps(self.observations())}
        write_tensors(file_at(folder, epoch), tensors, header)
        for old in saved_files(folder)[:-2]:
            old.unlink()

    def restore(self, folder: Path, position: Position) -> None:
        """Restore the state at ``position``; without its file (none is of within an epoch) lifetimes are unknown."""
        for newer in saved_files(folder):
            if epoch_of(newer) > position.epoch:
                newer.unlink()
        if position == START:
            return
        if position.batch:
            self.complete = False
            return
        try:
            with opened_file(folder, position.epoch) as opened:
                self.revived_at.copy_(opened.get_tensor("born"))
                self.lifetimes.copy_(opened.get_tensor("stays"))
                self.steps_stayed.copy_(opened.get_tensor("steps_stayed"))
                observed = parse_observations(opened.metadata())
        except (OSError, *FILE_ERRORS):
            self.complete = False
            return
        self.complete = observed["stays"] is not None
        self.changes = [(e, step, torch.tensor(pair, dtype=torch.double)) for e, step, *pair in observed["looks"]]


def file_at(folder: Path, epoch: int) -> Path:
    return folder / f"watch-{epoch}.safetensors"


def epoch_of(file: Path) -> int:
    return int(file.stem.removeprefix("watch-"))


def saved_files(folder: Path) -> list[Path]:
    """Return the files of the probe in the order of their epochs."""
    return sorted((file for file in folder.glob("watch-*.safetensors") if file.stem[6:].isdecimal()), key=epoch_of)


@contextmanager
def opened_file(folder: Path, epoch: int) -> Iterator[Any]:
    """Open the file of an epoch, which must be a regular one: opening a pipe would wait for ever."""
    file = file_at(folder, epoch)
    if file.exists() and not file.is_file():
        raise ValueError("not a regular file")
    with safe_open(file, "pt") as opened:
        yield opened


def parse_observations(header: Mapping[str, str] | None) -> dict[str, Any]:
    """Return what a file's header says was observed."""
    observed = parse_object((header or {})["found"])
    OBSERVED(observed, "")
    return observed


def read_observations(folder: Path, epoch: int) -> dict[str, Any] | None:
    """Read what the probe of a run had observed after ``epoch`` epochs, None if there was no probe."""
    file = file_at(folder, epoch)
    if not os.path.lexists(file):
        return None
    with naming_file(file, "remove it to do without", FILE_ERRORS), opened_file(folder, epoch) as opened:
        return parse_observations(opened.metadata())


def top1(net: SparseNet, loader: Batches, settings: EngineSettings) -> Tensor:
    """Return the accuracy of the pruned path in percent, as a tensor on the device; the training is unchanged."""
    evaluation = Evaluation(net, loader.device, ["pruned"])
    with PROCESS_LOCK, autocast(loader.device, settings):
        evaluation.run(large_test_batches(loader), lambda batch: evaluation.add(*batch))
    return evaluation.top1()[0]
