"""Supply the batches of a recorded step: gathered on the device by the recording, or copied into fixed memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from dcil.data import Batches, Loader
from dcil.data.batches import Batch
from dcil.engine import kernels
from dcil.engine.evaluate import large_batch_size


class BatchSource(Protocol):
    def train(self, epoch: int, start: int = 0) -> Iterator[int]:
        """Yield the sizes of an epoch's batches from batch ``start`` on; after each, ``batch`` returns that batch."""

    def batch(self, size: int) -> Batch:
        """Return the next training batch; a replay of this call produces the one after it."""

    def peek(self, size: int) -> Tensor:
        """Return the images of the batch that ``batch`` returns next."""

    def test(self) -> Iterator[int]: ...

    def test_batch(self, size: int) -> Batch: ...


def make_source(loader: Batches, exact: bool) -> BatchSource:
    """Choose the source for ``loader``; ``exact`` asks for bitwise the loader's own batches."""
    if isinstance(loader, Loader) and loader.shard.world == 1:
        return DeviceSource(loader, kernel=kernels.AVAILABLE and loader.device.type == "cuda" and not exact)
    return CopiedSource(loader)


class DeviceSource:
    """Keeps the data set, the epoch's random choices and the position in them on the device."""

    def __init__(self, loader: Loader, kernel: bool) -> None:
        self.loader, self.kernel = loader, kernel
        self.drawn = torch.stack(loader.draw(0)).to(loader.device)
        self.position = torch.zeros((), dtype=torch.long, device=loader.device)
        self.test_batch_size = large_batch_size(loader)
        self.offsets = torch.arange(max(loader.batch, self.test_batch_size), device=loader.device)

    def train(self, epoch: int, start: int = 0) -> Iterator[int]:
        self.drawn.copy_(torch.stack(self.loader.draw(epoch)))
        self.rewind(start)
        yield from sizes(self.drawn.shape[1] - start * self.loader.batch, self.loader.batch)

    def batch(self, size: int) -> Batch:
        if self.kernel:
            batch = kernels.crop.crop(self.loader, self.drawn, self.position, size)
        else:
            batch = self.loader.crop(self.drawn.index_select(1, self.position + self.offsets[:size]))
        self.position.add_(size)
        return batch

    def peek(self, size: int) -> Tensor:
        x, _ = self.batch(size)
        self.position.sub_(size)
        return x

    def test(self) -> Iterator[int]:
        self.rewind()
        yield from sizes(self.loader.test_size, self.test_batch_size)

    def test_batch(self, size: int) -> Batch:
        batch = self.loader.plain(self.position + self.offsets[:size])
        self.position.add_(size)
        return batch

    def rewind(self, batch: int = 0) -> None:
        self.position.fill_(batch * self.loader.batch)


def sizes(images: int, batch: int) -> Iterator[int]:
    for start in range(0, images, batch):
        yield min(batch, images - start)


class CopiedSource:
    """Copies the loader's batches to the memory that the recording reads."""

    def __init__(self, loader: Batches) -> None:
        self.loader = loader
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def copy_in(self, x: Tensor, y: Tensor) -> int:
        if len(y) not in self.buffers:
            self.buffers[len(y)] = x.clone(), y.clone()
        images, labels = self.buffers[len(y)]
        images.copy_(x, non_blocking=True)
        labels.copy_(y, non_blocking=True)
        return len(y)

    def train(self, epoch: int, start: int = 0) -> Iterator[int]:
        for x, y in self.loader.train(epoch, start):
            yield self.copy_in(x, y)

    def batch(self, size: int) -> Batch:
        return self.buffers[size]

    def test(self) -> Iterator[int]:
        for x, y in self.loader.test():
            yield self.copy_in(x, y)

    test_batch = batch

    def peek(self, size: int) -> Tensor:
        return self.buffers[size][0]
