"""Read ImageNet, or any data in its layout: DATA_DIR/train/CLASS/*.jpg and DATA_DIR/val/CLASS/*.jpg.

Images stay on the disk; worker processes decode them batch by batch, and they are normalised on the device.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch.utils import data as torch_data

from dcil.data import decode
from dcil.data.batches import Batch, Normalize, Shard
from dcil.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Rows = npt.NDArray[np.int64]
"""Indices of images in a split."""
Identity = tuple[int, int]
"""Device and number of a folder, the same by whatever links it is reached."""


def usable_cpus() -> int:
    """Return the number of CPUs this process may use.

    In a container or a batch job that is fewer than the machine has, and processes started by torchrun share them.
    """
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, found // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """List the image files of a split, ordered by class and name.

    Names are one string of bytes, cut at `ends`: reading a list of Python strings changes their reference counts, which
    copies their memory pages into every worker process.
    """

    folder: Path
    names: bytes
    ends: Rows
    labels: Rows

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, row: int) -> Path:
        begin = int(self.ends[row - 1]) if row else 0
        return self.folder / os.fsdecode(self.names[begin : int(self.ends[row])])


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """Describe a folder of images: training crops of `crop` pixels; test images resized to `resize`, cut to `crop`."""

    train: ImageFiles
    test: ImageFiles
    class_names: tuple[str, ...]
    crop: int = 224
    resize: int = 256
    workers: int = field(default_factory=lambda: min(16, usable_cpus()))
    name: str = "imagefolder"
    max_pixels: int = decode.MAX_PIXELS

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
        self._normalize = Normalize(MEAN, STD, self.device)

    @property
    def steps(self) -> int:
        return self.shard.steps(len(self.dataset.train))

    def train(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield every training image once, randomly cropped and flipped, in a random order; from batch ``start`` on."""
        files = self.dataset.train
        order = _random(self.seed, epoch).permutation(len(files))
        return self._batches(files, partial(_train_pixels, self.dataset.crop, self.seed, epoch), order, start)

    def test(self) -> Iterator[Batch]:
        """Yield the centre crops of the test images in order."""
        files = self.dataset.test
        transform = partial(_test_pixels, self.dataset.resize, self.dataset.crop)
        return self._batches(files, transform, np.arange(len(files)))

    def _batches(self, files: ImageFiles, transform: Transform, order: Rows, start: int = 0) -> Iterator[Batch]:
        batches = [order[part] for part in self.shard.slices(len(order), start)]
        loader = torch_data.DataLoader(
            _Decoder(files, self.dataset.crop, transform, self.dataset.max_pixels),
            batch_size=None,  # the sampler gives whole batches, and so does the decoder
            sampler=batches,
            num_workers=min(self.dataset.workers, len(batches)),
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # else it would draw the workers' seeds from the global one
        )
        for found in _alive(loader):
            if isinstance(found, UserError):
                raise found
            pixels, labels = (tensor.to(self.device, non_blocking=True) for tensor in found)
            yield self._normalize(pixels), labels


Transform = Callable[[int, "Image"], decode.Pixels]
"""(index, image) -> pixels of shape (H, W, 3)."""


class _Decoder(torch_data.Dataset["Batch | UserError"]):
    """Decode the images at given indices into uint8 (N, H, W, 3) and labels, in the worker processes."""

    def __init__(self, files: ImageFiles, size: int, transform: Transform, max_pixels: int) -> None:
        self.files, self.size, self.transform, self.max_pixels = files, size, transform, max_pixels

    def __getitem__(self, rows: Rows) -> Batch | UserError:
        """Return the batch, or the error: one raised in a worker would arrive with a traceback as its message."""
        pixels = np.empty((len(rows), self.size, self.size, 3), np.uint8)
        try:
            for place, row in enumerate(rows.tolist()):
                pixels[place] = self.transform(row, decode.read(self.files.path(row), self.max_pixels))
        except UserError as error:
            return error
        return torch.from_numpy(pixels), torch.from_numpy(self.files.labels[rows])


def _alive(loader: torch_data.DataLoader[Batch | UserError]) -> Iterator[Batch | UserError]:
    """Yield the loader's batches; the end of a worker process, for lack of memory as a rule, is a UserError."""
    try:
        yield from loader
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"a process that decodes images must not end before the training: {reason}") from error


def _random(seed: int, *key: int) -> np.random.Generator:
    """Return an independent generator per seed and key (seeding with a tuple would make (1, 2) and (1, 2, 0) equal)."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def _train_pixels(size: int, seed: int, epoch: int, row: int, image: Image) -> decode.Pixels:
    return decode.random_resized_crop(image, size, _random(seed, epoch, row))


def _test_pixels(resize: int, crop: int, row: int, image: Image) -> decode.Pixels:
    return decode.center_crop(image, resize, crop)


def load(data_dir: Path) -> ImageFolder:
    """Find the images below `data_dir`/train and `data_dir`/val (or test), one class per folder."""
    decode.require_pillow()
    folder = data_dir / "train"
    held_out = next((data_dir / name for name in ("val", "test") if (data_dir / name).is_dir()), data_dir / "val")
    train, test = scan(folder), scan(held_out)
    lacking = {folder: test.keys() - train.keys(), held_out: train.keys() - test.keys()}
    if train.keys() != test.keys():
        differences = "; ".join(f"{where} lacks {_listing(names)}" for where, names in lacking.items() if names)
        raise UserError(f"training and test images must have the same classes: {differences}")
    return ImageFolder(_files(folder, train), _files(held_out, test), tuple(train))


def scan(folder: Path) -> dict[str, list[str]]:
    """Map each class to the names of its images relative to `folder`, both sorted, hidden files left out."""
    wanted = f"put images into {folder.parent / 'train' / 'CLASS'} and {folder.parent / 'val' / 'CLASS'}"
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist: {wanted}, one folder per class")
    classes = [entry.name for entry in _entries(folder) if _kind(entry) == "folder"]
    if not classes:
        raise UserError(f"{folder} has no class folders: {wanted}, one folder per class")
    above = [_identity(place) for place in (folder.absolute(), *folder.resolve().parents)]
    found = {name: sorted(_images(folder, name, set(above))) for name in sorted(classes)}
    if empty := [name for name, images in found.items() if not images]:
        raise UserError(f"{folder} has no images of {_listing(empty)}: {wanted} ({', '.join(SUFFIXES)})")
    return found


def _images(folder: Path, name: str, seen: set[Identity]) -> Iterator[str]:
    """Yield the images of a class; a folder is read once, by whatever links, and not at all if `seen`.

    Without this, a link to a folder that holds it would multiply the images.
    """
    waiting = deque([name])
    while waiting:
        below = waiting.popleft()
        if (identity := _identity(folder / below)) in seen:
            continue
        seen.add(identity)
        for entry in _entries(folder / below):
            path = os.path.join(below, entry.name)
            kind = _kind(entry)
            if kind == "folder":
                waiting.append(path) if entry.is_symlink() else waiting.appendleft(path)  # links last
            elif entry.name.lower().endswith(SUFFIXES):
                if kind != "file":
                    raise UserError(f"{folder / path}: an image must be a regular file, this is {kind}; remove it")
                yield path


def _kind(entry: os.DirEntry[str]) -> str:
    try:
        return "folder" if entry.is_dir() else "file" if entry.is_file() else "none, or a link to nothing"
    except OSError as error:  # such as a link to itself
        return f"a link that cannot be followed ({error.strerror})"


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """List a folder in order, without hidden entries such as .ipynb_checkpoints and the ._name files of macOS."""
    try:
        with os.scandir(folder) as entries:
            return sorted((e for e in entries if not e.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from error


def _identity(folder: Path) -> Identity:
    try:
        found = os.stat(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from error
    return found.st_dev, found.st_ino


def _files(folder: Path, found: dict[str, list[str]]) -> ImageFiles:
    names = [os.fsencode(image) for images in found.values() for image in images]
    ends = np.cumsum([len(name) for name in names], dtype=np.int64)
    labels = np.repeat(np.arange(len(found), dtype=np.int64), [len(images) for images in found.values()])
    return ImageFiles(folder, b"".join(names), ends, labels)


def _listing(names: Collection[str], most: int = 5) -> str:
    shown = ", ".join(sorted(names)[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
