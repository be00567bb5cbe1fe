"""Define the interface of data sets and loaders, the sharding of batches and the normalisation of pixels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dcil.errors import UserError

Batch = tuple[Tensor, Tensor]
"""float32 normalised images (N, C, H, W) and int64 labels (N,), or int64 tokens (N, T) and the next ones (N, T); both
on the loader's device."""


class Batches(Protocol):
    """Iterate over the batches of a data set; those of an epoch depend on (seed, epoch) and nothing else."""

    @property
    def steps(self) -> int:
        """Return the optimizer steps of an epoch, that is its global batches; the last one may be smaller."""

    @property
    def device(self) -> torch.device: ...

    def train(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield every training image once, augmented, or every sequence, in a random order; from batch ``start`` on."""

    def test(self) -> Iterator[Batch]:
        """Yield the test images, not augmented, or sequences, in the order of the data set."""


class TrainingData(Protocol):
    """Describe a data set and build its loaders: images in memory or in files, or sequences of tokens."""

    @property
    def name(self) -> str: ...

    @property
    def classes(self) -> int:
        """Return the number of classes, or of tokens in the vocabulary."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return channels, height and width of a training image, or the length of a sequence."""

    @property
    def train_size(self) -> int: ...

    def loader(self, batch: int, device: torch.device | str, seed: int, rank: int = 0, world: int = 1) -> Batches:
        """Build the loader of process `rank` of `world`; `batch` is the size of the global batch."""


@dataclass(frozen=True)
class Shard:
    """Select the images, or sequences, of a process: of every global batch those at positions rank, rank + world, …"""

    batch: int
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise UserError(f"the batch size must be >= 1, got {self.batch}")
        if not 0 <= self.rank < self.world:
            raise UserError(f"rank must be >= 0 and below the number of processes ({self.world}), got {self.rank}")
        if self.batch < self.world:
            raise UserError(f"batch must be >= the number of processes ({self.world}), got {self.batch}")

    def steps(self, images: int) -> int:
        """Return the number of global batches of so many images."""
        return math.ceil(images / self.batch)

    def slices(self, images: int, start: int = 0) -> Iterator[slice]:
        """Yield a slice of range(images) per global batch from batch ``start`` on.

        It is empty where the last batch has no image for this rank.
        """
        for first in range(start * self.batch, images, self.batch):
            yield slice(first + self.rank, first + self.batch, self.world)


class Normalize:
    """Map uint8 (N, H, W, C) to float32 (N, C, H, W) in channels_last order: (p / 255 - mean) / std."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> None:
        deviation = torch.tensor(std, device=device)
        self.scale = 1 / (255 * deviation)
        self.shift = -torch.tensor(mean, device=device) / deviation

    def __call__(self, pixels: Tensor) -> Tensor:
        return pixels.float().mul_(self.scale).add_(self.shift).permute(0, 3, 1, 2)
