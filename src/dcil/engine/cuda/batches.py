"""Where a recorded step finds its batch: gathered on the device inside the recording, or copied into fixed memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from dcil.data import Batches, Loader
from dcil.data.batches import Batch
from dcil.engine import kernels
from dcil.engine.evaluate import large_batch_size


class Source(Protocol):
    def train(self, epoch: int) -> Iterator[int]:
        """The sizes of an epoch's batches; each time ``batch`` stands ready for it."""

    def batch(self, size: int) -> Batch:
        """The next training batch; replayed, it is the one after."""

    def test(self) -> Iterator[int]: ...

    def test_batch(self, size: int) -> Batch: ...

    def rewind(self) -> None:
        """To the first batch."""


def source(loader: Batches, exact: bool) -> Source:
    """``exact``: to the last bit as the loader itself makes them."""
    if isinstance(loader, Loader) and loader.shard.world == 1:
        return OnDevice(loader, kernel=kernels.AVAILABLE and loader.device.type == "cuda" and not exact)
    return Streamed(loader)


class OnDevice:
    """The data set and the epoch's random choices are on the device; a position there says which are next."""

    def __init__(self, loader: Loader, kernel: bool) -> None:
        self.loader, self.kernel = loader, kernel
        self.drawn = torch.stack(loader.draw(0)).to(loader.device)
        self.position = torch.zeros((), dtype=torch.long, device=loader.device)
        self.test_images = large_batch_size(loader)
        self.ahead = torch.arange(max(loader.batch, self.test_images), device=loader.device)

    def train(self, epoch: int) -> Iterator[int]:
        self.drawn.copy_(torch.stack(self.loader.draw(epoch)))
        self.rewind()
        yield from sizes(self.drawn.shape[1], self.loader.batch)

    def batch(self, size: int) -> Batch:
        if self.kernel:
            batch = kernels.crop.crop(self.loader, self.drawn, self.position, size)
        else:
            batch = self.loader.crop(self.drawn.index_select(1, self.position + self.ahead[:size]))
        self.position.add_(size)
        return batch

    def test(self) -> Iterator[int]:
        self.rewind()
        yield from sizes(self.loader.test_size, self.test_images)

    def test_batch(self, size: int) -> Batch:
        batch = self.loader.plain(self.position + self.ahead[:size])
        self.position.add_(size)
        return batch

    def rewind(self) -> None:
        self.position.zero_()


def sizes(images: int, batch: int) -> Iterator[int]:
    for start in range(0, images, batch):
        yield min(batch, images - start)


class Streamed:
    """Batches come from elsewhere and are copied to where the recording reads them."""

    def __init__(self, loader: Batches) -> None:
        self.loader = loader
        self.places: dict[int, tuple[Tensor, Tensor]] = {}

    def put(self, x: Tensor, y: Tensor) -> int:
        if len(y) not in self.places:
            self.places[len(y)] = x.clone(), y.clone()
        here = self.places[len(y)]
        here[0].copy_(x, non_blocking=True)
        here[1].copy_(y, non_blocking=True)
        return len(y)

    def train(self, epoch: int) -> Iterator[int]:
        for x, y in self.loader.train(epoch):
            yield self.put(x, y)

    def batch(self, size: int) -> Batch:
        return self.places[size]

    def test(self) -> Iterator[int]:
        for x, y in self.loader.test():
            yield self.put(x, y)

    test_batch = batch

    def rewind(self) -> None: ...
