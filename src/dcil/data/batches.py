"""What training asks of any data set, and what every loader needs: its share of each batch and normalised pixels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dcil.errors import UserError

Batch = tuple[Tensor, Tensor]
"""float32 normalised images (N, C, H, W) and int64 labels (N,), both on the loader's device."""


class Batches(Protocol):
    """A loader. An epoch's batches depend on (seed, epoch) and on nothing that happened before."""

    @property
    def steps(self) -> int:
        """Optimizer steps in an epoch, which is global batches; the last one may be smaller."""

    @property
    def device(self) -> torch.device: ...

    def train(self, epoch: int) -> Iterator[Batch]:
        """The training images once, augmented, in a random order."""

    def test(self) -> Iterator[Batch]:
        """The test images as they are, in their own order."""


class ImageData(Protocol):
    """A data set, wherever its images are kept."""

    @property
    def name(self) -> str: ...

    @property
    def classes(self) -> int: ...

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one training image."""

    @property
    def train_size(self) -> int: ...

    def loader(self, batch: int, device: torch.device | str, seed: int, rank: int = 0, world: int = 1) -> Batches:
        """`batch` counts the images of all `world` processes together; this one gets those at rank::world of each."""


@dataclass(frozen=True)
class Share:
    """One process's part: of every global batch of `batch` images those at positions rank, rank + world, …"""

    batch: int
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise UserError(f"the batch size must be at least 1, not {self.batch}")
        if not 0 <= self.rank < self.world:
            raise UserError(f"rank {self.rank} is not one of {self.world} processes, which count from 0")
        if self.batch < self.world:
            raise UserError(f"a batch of {self.batch} does not give each of {self.world} processes an image")

    def steps(self, images: int) -> int:
        return math.ceil(images / self.batch)

    def slices(self, images: int) -> Iterator[slice]:
        """One slice of range(images) per global batch; it is empty where the last batch has no image for this rank."""
        for start in range(0, images, self.batch):
            yield slice(start + self.rank, start + self.batch, self.world)


class Normalize:
    """uint8 (N, H, W, C) -> float32 (N, C, H, W) in channels_last memory order: (p / 255 - mean) / std."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> None:
        spread = torch.tensor(std, device=device)
        self.scale = 1 / (255 * spread)
        self.shift = -torch.tensor(mean, device=device) / spread

    def __call__(self, pixels: Tensor) -> Tensor:
        return pixels.float().mul_(self.scale).add_(self.shift).permute(0, 3, 1, 2)
