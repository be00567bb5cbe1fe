"""Mask probe: what mask updates do, seen from beside the training: accuracy around a change, and how long revived
weights stay. Nothing here changes the training, and nothing waits for the device until it is asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dcil import SparseNet, Update
from dcil.data import Batches, Loader
from dcil.data.batches import Batch
from dcil.engine import PROCESS_LOCK, EngineSettings
from dcil.engine.eager import autocast
from dcil.runs.atomic import write_atomically

EVERY = 5  # epochs between looks at the accuracy around a change: two evaluations each
EDGES = [2**k for k in range(1, 24)]  # stays are counted in classes of steps: 1, 2-3, 4-7, …
TEST_BATCH = 2000
NEVER = -1


class MaskProbe:
    """Observes every mask update of a network.

    ``born`` holds for every weight the step at which it was last revived, NEVER for one that was not; a stay ends
    when the weight is dropped again.
    """

    def __init__(self, net: SparseNet, loader: Batches, speed: EngineSettings) -> None:
        self.net, self.loader, self.speed = net, loader, speed
        self.born = torch.full_like(self.masks(), NEVER, dtype=torch.int32)
        self.stays = torch.zeros(len(EDGES) + 1, dtype=torch.long, device=self.born.device)
        self.edges = torch.tensor(EDGES, dtype=torch.int32, device=self.born.device)
        self.steps_stayed = torch.zeros((), dtype=torch.double, device=self.born.device)
        self.looks: list[tuple[int, int, Tensor]] = []  # epoch, step, (before, after) in percent
        self.whole = True  # since the first step?
        self.chosen: int | None = None
        self.seen: Tensor | None = None  # the masks as the last update left them
        self.epoch = 0
        self._before: Tensor | None = None  # top-1 before the update that is looked at
        net.add_observer(self)

    def begin(self, epoch: int, steps: int) -> None:
        """Before epoch number ``epoch`` (from 0) of ``steps`` steps: choose the update to look at, if any.

        One in the middle of the epoch: the first may also prune more, since the sparsity grows by epoch.
        """
        self.epoch, self.chosen = epoch + 1, None
        if (epoch + 1) % EVERY == 0:
            now = self.net.steps_done
            due = [step for step in range(now + 1, now + steps + 1) if self.net.method.due(step)]
            self.chosen = due[len(due) // 2] if due else None

    @torch.no_grad()
    def before_update(self, step: int) -> None:
        """Remember the masks and, at the chosen update, the accuracy with them."""
        self.seen = self.masks() if self.seen is None else self.seen  # nothing else changes masks
        self._before = top1(self.net, self.loader, self.speed) if step == self.chosen else None

    @torch.no_grad()
    def after_update(self, update: Update) -> None:
        """Compare with the masks before, and with the accuracy where it was measured."""
        if self._before is not None:
            after = top1(self.net, self.loader, self.speed)
            self.looks.append((self.epoch, update.step, torch.stack([self._before, after])))
        assert self.seen is not None
        old, self.seen = self.seen, self.masks()
        self.count(old, self.seen, update.step)

    def count(self, old: Tensor, new: Tensor, step: int) -> None:
        ended = old & ~new & (self.born != NEVER)
        stayed = step - self.born
        self.stays.index_add_(0, torch.bucketize(stayed, self.edges, right=True), ended.long())
        self.steps_stayed += (stayed * ended).sum()
        self.born.copy_(torch.where(new, torch.where(old, self.born, step), NEVER))

    def masks(self) -> Tensor:
        return torch.cat([mask.flatten() for mask in self.net.masks.values()])

    def found(self) -> dict[str, Any]:
        """What was seen (waits for the device)."""
        return {
            "looks": [[epoch, step, *(round(v, 4) for v in pair.tolist())] for epoch, step, pair in self.looks],
            "stays": None
            if not self.whole
            else {
                "at_least": [1, *EDGES],
                "ended": self.stays.tolist(),
                "steps_stayed": self.steps_stayed.item(),
                "still_there": int((self.born != NEVER).sum()),
            },
        }

    # -- a run that is interrupted goes on counting ---------------------------------------------------------------

    def save(self, folder: Path, epoch: int) -> None:
        """Written before the checkpoint of the same epoch, the one before is kept: one of them always fits it."""
        tensors = {"born": self.born.cpu(), "stays": self.stays.cpu(), "steps_stayed": self.steps_stayed.cpu()}
        header = {"found": json.dumps(self.found())}
        write_atomically(file_at(folder, epoch), lambda draft: save_file(tensors, draft, header))
        for old in sorted(folder.glob("watch-*.safetensors"), key=epoch_of)[:-2]:
            old.unlink()

    def restore(self, folder: Path, epoch: int) -> None:
        """Go on counting after ``epoch`` epochs; without the file of that epoch, stays are not known any more."""
        for newer in folder.glob("watch-*.safetensors"):
            if epoch_of(newer) > epoch:
                newer.unlink()
        if epoch == 0:
            return
        try:
            with safe_open(file_at(folder, epoch), "pt") as opened:
                self.born.copy_(opened.get_tensor("born"))
                self.stays.copy_(opened.get_tensor("stays"))
                self.steps_stayed.copy_(opened.get_tensor("steps_stayed"))
                found = json.loads(opened.metadata()["found"])
        except (OSError, SafetensorError):
            self.whole = False
            return
        self.whole = found["stays"] is not None
        self.looks = [(e, step, torch.tensor(pair, dtype=torch.double)) for e, step, *pair in found["looks"]]


def file_at(folder: Path, epoch: int) -> Path:
    return folder / f"watch-{epoch}.safetensors"


def epoch_of(file: Path) -> int:
    return int(file.stem.removeprefix("watch-"))


def read_found(folder: Path, epoch: int) -> dict[str, Any] | None:
    """What the watch of a run had seen after ``epoch`` epochs, None if there was no watch."""
    if not file_at(folder, epoch).exists():
        return None
    with safe_open(file_at(folder, epoch), "pt") as opened:
        found: dict[str, Any] = json.loads(opened.metadata()["found"])
    return found


@torch.no_grad()
def top1(net: SparseNet, loader: Batches, speed: EngineSettings) -> Tensor:
    """Accuracy of the pruned path in percent, left on the device; the training goes on as if nothing had been."""
    training = net.training
    net.eval()
    hits = torch.zeros((), dtype=torch.double, device=loader.device)
    images = 0
    with PROCESS_LOCK, autocast(loader.device, speed):
        for x, y in test_batches(loader):
            hits += (net.path("pruned", x).argmax(1) == y).sum()
            images += len(y)
    net.train(training)
    return 100 * hits / images


def test_batches(loader: Batches) -> Iterator[Batch]:
    """The test images in larger pieces than the training's where they are on the device anyway."""
    if not isinstance(loader, Loader):
        yield from loader.test()
        return
    for start in range(0, loader.test_size, TEST_BATCH):
        yield loader.plain(slice(start, start + TEST_BATCH))
