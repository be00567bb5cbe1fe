"""Batches of images that stay on the disk: worker processes decode and crop them, the device normalises them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import data as torch_data

from dcil.data import decode
from dcil.data.batches import Batch, Normalize, Shard
from dcil.data.color_jitter import draw, jitter
from dcil.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Rows = npt.NDArray[np.int64]
"""Indices of images in a split."""


def usable_cpus() -> int:
    """Return the number of CPUs this process may use.

    In a container or a batch job that is fewer than the machine has, and processes started by torchrun share them.
    """
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, found // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class Images(Protocol):
    """A split: encoded images with their labels, wherever they are stored."""

    @property
    def labels(self) -> Rows: ...

    def __len__(self) -> int: ...

    def name(self, row: int) -> str:
        """Return where an image is, for messages."""

    def open(self, row: int) -> BinaryIO:
        """Open an encoded image."""

    def order(self, random: np.random.Generator) -> Rows:
        """Draw the order of an epoch."""


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """Describe images in files: training crops of `crop` pixels; test images resized to `resize`, cut to `crop`.

    With `skip_damaged` images that cannot be read are left out of their batches, with a warning. `color_jitter` is the
    largest change of brightness, contrast and saturation of a training image.
    """

    train: Images
    test: Images
    class_names: tuple[str, ...]
    crop: int = 224
    resize: int = 256
    workers: int = field(default_factory=lambda: min(16, usable_cpus()))
    name: str = "imagefolder"
    max_pixels: int = decode.MAX_PIXELS
    skip_damaged: bool = False
    color_jitter: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.crop <= self.resize:
            raise UserError(f"crop must be from 1 to resize ({self.resize}), got {self.crop}")
        if self.workers < 0:
            raise UserError(f"workers must be >= 0, got {self.workers} (0 decodes in the main process)")

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, int, int]:
        return 3, self.crop, self.crop

    @property
    def train_size(self) -> int:
        return len(self.train)

    def loader(self, batch: int, device: torch.device | str, seed: int, rank: int = 0, world: int = 1) -> FolderLoader:
        return FolderLoader(self, batch, device, seed, rank, world)


class FolderLoader:
    """Yield the batches of an `ImageFolder`, decoded by worker processes; their number affects the speed only."""

    def __init__(
        self, dataset: ImageFolder, batch: int, device: torch.device | str, seed: int, rank: int = 0, world: int = 1
    ) -> None:
        self.shard = Shard(batch, rank, world)
        self.dataset, self.seed, self.device = dataset, seed, torch.device(device)
        self._normalize, self._warned = Normalize(MEAN, STD, self.device), set[str]()

    @property
    def steps(self) -> int:
        return self.shard.steps(len(self.dataset.train))

    def train(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield every training image once, randomly cropped and flipped, in a random order; from batch ``start`` on."""
        files = self.dataset.train
        order, strength = files.order(random_for(self.seed, epoch)), self.dataset.color_jitter
        # The rows of images are other keys: the factors depend on nothing that the crops do.
        factors = draw(len(files), strength, random_for(self.seed, epoch, len(files))) if strength else None
        transform = partial(_train_pixels, self.dataset.crop, self.seed, epoch)
        return self._batches(files, transform, order, start, factors)

    def test(self) -> Iterator[Batch]:
        """Yield the centre crops of the test images in order."""
        files = self.dataset.test
        transform = partial(_test_pixels, self.dataset.resize, self.dataset.crop)
        return self._batches(files, transform, np.arange(len(files)))

    def _batches(
        self, files: Images, transform: Transform, order: Rows, start: int = 0, factors: Tensor | None = None
    ) -> Iterator[Batch]:
        batches = [order[part] for part in self.shard.slices(len(order), start)]
        loader = torch_data.DataLoader(
            _Decoder(files, self.dataset, transform),
            batch_size=None,  # the sampler gives whole batches, and so does the decoder
            sampler=batches,
            num_workers=min(self.dataset.workers, len(batches)),
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # else it would draw the workers' seeds from the global one
        )
        for found in alive(loader):
            if isinstance(found, UserError):
                raise found
            *batch, rows, damaged = found
            self._warn(damaged)
            pixels, labels = (tensor.to(self.device, non_blocking=True) for tensor in batch)
            if factors is not None:
                pixels = jitter(pixels, factors[rows].to(self.device, non_blocking=True))
            yield self._normalize(pixels), labels

    def _warn(self, damaged: list[str]) -> None:
        """Name images that were left out, each once."""
        for reason in damaged:
            if reason not in self._warned:
                self._warned.add(reason)
                warnings.warn(f"{reason}: left out of its batch", stacklevel=3)


Item = TypeVar("Item")
Transform = Callable[[int, "Image"], decode.Pixels]
"""(index, image) -> pixels of shape (H, W, 3)."""


Decoded = tuple[Tensor, Tensor, list[int], list[str]]
"""uint8 (N, H, W, 3), labels, their rows, and why images are not among them."""


class _Decoder(torch_data.Dataset["Decoded | UserError"]):
    """Decode the images at given indices, in the worker processes."""

    def __init__(self, files: Images, dataset: ImageFolder, transform: Transform) -> None:
        self.files, self.transform = files, transform
        self.size, self.max_pixels, self.skip = dataset.crop, dataset.max_pixels, dataset.skip_damaged

    def __getitem__(self, rows: Rows) -> Decoded | UserError:
        """Return the batch, or the error: one raised in a worker would arrive with a traceback as its message."""
        pixels, kept, damaged = np.empty((len(rows), self.size, self.size, 3), np.uint8), list[int](), list[str]()
        for row in rows.tolist():
            found = self.decoded(row)
            if not isinstance(found, UserError):
                pixels[len(kept)] = found
                kept.append(row)
            elif not self.skip or len(damaged) + 1 == len(rows):
                return found
            else:
                damaged.append(str(found))
        return torch.from_numpy(pixels[: len(kept)]), torch.from_numpy(self.files.labels[kept]), kept, damaged

    def decoded(self, row: int) -> decode.Pixels | UserError:
        try:
            with decode.naming(self.files.name(row)):
                image = decode.read_open(self.files.open(row), self.max_pixels)
        except UserError as error:
            return error
        return self.transform(row, image)


def alive(loader: torch_data.DataLoader[Item]) -> Iterator[Item]:
    """Yield the loader's batches; the end of a worker process, for lack of memory as a rule, is a UserError."""
    try:
        yield from loader
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"a process that decodes images must not end before the training: {reason}") from error


def random_for(seed: int, *key: int) -> np.random.Generator:
    """Return an independent generator per seed and key (seeding with a tuple would make (1, 2) and (1, 2, 0) equal)."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def _train_pixels(size: int, seed: int, epoch: int, row: int, image: Image) -> decode.Pixels:
    return decode.random_resized_crop(image, size, random_for(seed, epoch, row))


def _test_pixels(resize: int, crop: int, row: int, image: Image) -> decode.Pixels:
    return decode.center_crop(image, resize, crop)
