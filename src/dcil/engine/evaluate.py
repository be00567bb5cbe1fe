"""Accuracy of the paths of a network on the test images. The only code that counts hits over test batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from dcil import SparseNet
from dcil.data import Batches, Loader
from dcil.data.batches import Batch

#: A test batch, or whatever stands for one (the engine that replays a recording passes its size).
B = TypeVar("B")
LARGE_BATCH, LARGE_PIXELS = 2000, 2**24  # images and pixels of a large test batch


class Evaluation:
    """Hit counts on the device: one row (top-1, top-5) for each path, and the number of images in the last row."""

    def __init__(self, net: SparseNet, device: torch.device, paths: Iterable[str] | None = None) -> None:
        self.net, self.paths = net, tuple(net.method.paths if paths is None else paths)
        self.counts = torch.zeros(len(self.paths) + 1, 2, dtype=torch.long, device=device)

    @torch.no_grad()
    def add(self, x: Tensor, y: Tensor, logits: Callable[[str, Tensor], Tensor] | None = None) -> None:
        """Count one batch; ``logits(path, x)`` defaults to the network's own path."""
        compute = logits or self.net.path
        for row, path in zip(self.counts, self.paths, strict=False):  # the last row is for the images
            row.add_(correct(compute(path, x), y))
        self.counts[-1].add_(len(y))

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
        return 100 * self.counts[:-1, 0].double() / self.counts[-1, 0]

    def accuracy(self, total: Callable[[Tensor], Tensor] = lambda counts: counts) -> dict[str, tuple[float, float]]:
        """Return path -> (top-1, top-5) in percent; waits for the device. ``total`` sums counts over processes."""
        *hits, (images, _) = total(self.counts).tolist()
        return {
            path: (100 * top1 / images, 100 * top5 / images)
            for path, (top1, top5) in zip(self.paths, hits, strict=True)
        }


def evaluate(net: SparseNet, batches: Batches) -> dict[str, tuple[float, float]]:
    """Return path -> (top-1, top-5) in percent, in one pass over the images; waits for the device once, at the end."""
    evaluation = Evaluation(net, batches.device)
    evaluation.run(batches.test(), lambda batch: evaluation.add(*batch))
    return evaluation.accuracy()


def correct(logits: Tensor, target: Tensor) -> Tensor:
    """Return how many targets are the first, and among the first five, of the logits."""
    ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices == target[:, None]
    return torch.stack([ranked[:, 0].sum(), ranked.sum()])


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
