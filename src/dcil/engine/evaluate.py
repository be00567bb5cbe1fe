"""Accuracy and loss of the paths of a network on the test data. The only code that counts hits over test batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dcil import SparseNet
from dcil.data import Batches, Loader
from dcil.data.batches import Batch
from dcil.engine.step_settings import by_target

#: A test batch, or whatever stands for one (the engine that replays a recording passes its size).
B = TypeVar("B")
LARGE_BATCH, LARGE_PIXELS = 2000, 2**24  # images and pixels of a large test batch


class Scores(NamedTuple):
    """Accuracies in percent, and the mean cross-entropy in nats, per target: an image, or a token to be predicted."""

    top1: float
    top5: float
    loss: float


class Evaluation:
    """Sums on the device: a row (top-1 hits, top-5 hits, loss) for each path, and the number of targets in the last."""

    def __init__(self, net: SparseNet, device: torch.device, paths: Iterable[str] | None = None) -> None:
        self.net, self.paths = net, tuple(net.method.paths if paths is None else paths)
        self.counts = torch.zeros(len(self.paths) + 1, 3, dtype=torch.double, device=device)

    @torch.no_grad()
    def add(self, x: Tensor, y: Tensor, logits: Callable[[str, Tensor], Tensor] | None = None) -> None:
        """Count one batch; ``logits(path, x)`` defaults to the network's own path."""
        compute = logits or self.net.path
        for row, path in zip(self.counts, self.paths, strict=False):  # the last row is for the targets
            row.add_(summed(by_target(compute(path, x)), y.flatten()))
        self.counts[-1].add_(y.numel())

    def run(self, batches: Iterable[B], add: Callable[[B], None]) -> None:
        """Start from zero and call ``add`` for every batch, with the network in evaluation mode."""
        training = self.net.training
        self.net.eval()
        self.counts.zero_()
        for batch in batches:
            add(batch)
        self.net.train(training)

    def top1(self) -> Tensor:
        """Return the top-1 accuracy of each path in percent, on the device: nothing waits for it."""
        return 100 * self.counts[:-1, 0] / self.counts[-1, 0]

    def scores(self, total: Callable[[Tensor], Tensor] = lambda counts: counts) -> dict[str, Scores]:
        """Return path -> scores; waits for the device. ``total`` sums counts over processes."""
        *sums, (targets, *_) = total(self.counts).tolist()
        return {
            path: Scores(100 * top1 / targets, 100 * top5 / targets, loss / targets)
            for path, (top1, top5, loss) in zip(self.paths, sums, strict=True)
        }


def evaluate(net: SparseNet, batches: Batches) -> dict[str, Scores]:
    """Return path -> scores, in one pass over the test data; waits for the device once, at the end."""
    evaluation = Evaluation(net, batches.device)
    evaluation.run(batches.test(), lambda batch: evaluation.add(*batch))
    return evaluation.scores()


def summed(logits: Tensor, target: Tensor) -> Tensor:
    """Return how many targets are the first, and among the first five, of the logits, and the sum of the losses."""
    ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices == target[:, None]
    loss = F.cross_entropy(logits.float(), target, reduction="none").double().sum()
    return torch.stack([ranked[:, 0].sum().double(), ranked.sum().double(), loss])


def large_batch_size(loader: Loader) -> int:
    """Return the size of test batches that need not match the training's: as large as memory allows."""
    height, width = loader.size
    return max(loader.batch, min(LARGE_BATCH, LARGE_PIXELS // (height * width)))


def large_test_batches(loader: Batches) -> Iterator[Batch]:
    """Yield the test images in large batches where they are on the device anyway, else as the loader does."""
    if not isinstance(loader, Loader):
        yield from loader.test()
        return
    size = large_batch_size(loader)
    for start in range(0, loader.test_size, size):
        yield loader.plain(slice(start, start + size))
