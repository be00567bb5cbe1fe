"""Hold a data set in memory: its tensors, statistics and augmentation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dcil.data.loader import Loader


@dataclass(frozen=True, eq=False)
class Split:
    """Hold uint8 `images` of shape (N, C, H, W), 0 to 255, and int64 `labels` of shape (N,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Hold a training and a test split; `mean` and `std` are per channel, of training pixels scaled to 0..1.

    Augmentation is a random crop after zero-padding by `pad` pixels and, where `flip`, a random horizontal flip.
    """

    name: str
    train: Split
    test: Split
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pad: int
    flip: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return channels, height and width of an image."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    @property
    def train_size(self) -> int:
        return len(self.train)

    def loader(self, batch: int, device: torch.device | str, seed: int, rank: int = 0, world: int = 1) -> Loader:
        return Loader(self, batch, device, seed, rank, world)
