"""Read images from tar files in WebDataset's layout: DATA_DIR/train/*.tar and DATA_DIR/val/*.tar.

Files of a tar that share their name up to its first dot are a sample: an image, and its class as a whole number in a
file with the suffix .cls. The tars are indexed once at the start, by the standard library; images are then read where
they lie, so that an epoch may go on anywhere.
"""

from __future__ import annotations

import io
import os
import tarfile
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from torch.utils import data as torch_data

from dcil.data import decode
from dcil.data.imagefolder import SUFFIXES
from dcil.data.images import ImageFolder, Rows, alive, usable_cpus
from dcil.errors import UserError

#: By how many places an image moves at most when the images of an epoch's tars, one after the other, are shuffled.
BUFFER = 10_000
LABEL = ".cls"
MOST_CLASSES = 10**6


class Index(NamedTuple):
    """The samples of one tar: where each image begins, its bytes and its class."""

    offsets: Rows
    sizes: Rows
    labels: Rows


@dataclass(frozen=True, eq=False)
class TarImages:
    """List the images of a split: those of tar i are the rows from `first[i]` to `first[i + 1]`."""

    tars: tuple[Path, ...]
    first: Rows
    offsets: Rows
    sizes: Rows
    labels: Rows
    buffer: int = BUFFER

    def __len__(self) -> int:
        return len(self.labels)

    def tar(self, row: int) -> Path:
        return self.tars[int(np.searchsorted(self.first, row, side="right")) - 1]

    def name(self, row: int) -> str:
        return f"{self.tar(row)}, the image at byte {self.offsets[row]}"

    def open(self, row: int) -> BinaryIO:
        with decode.open_regular(self.tar(row)) as file:
            file.seek(int(self.offsets[row]))
            return io.BytesIO(file.read(int(self.sizes[row])))

    def order(self, random: np.random.Generator) -> Rows:
        """Draw the order of an epoch: the tars in random order, their images shuffled over `buffer` places.

        Sorting place + U(0, buffer) moves an image by less than `buffer` places, as a shuffle buffer does; but the
        order is known from (seed, epoch) alone. Reading stays within a few tars at a time.
        """
        counts = np.diff(self.first)
        tars = random.permutation(len(self.tars))
        rows = np.concatenate([np.arange(self.first[tar], self.first[tar] + counts[tar]) for tar in tars])
        found: Rows = rows[np.argsort(np.arange(len(rows)) + self.buffer * random.random(len(rows)), kind="stable")]
        return found


def load(data_dir: Path) -> ImageFolder:
    """Index the tars below `data_dir`/train and `data_dir`/val (or test)."""
    decode.require_pillow()
    held_out = next((data_dir / name for name in ("val", "test") if (data_dir / name).is_dir()), data_dir / "val")
    train, test = split(data_dir / "train"), split(held_out)
    classes = int(train.labels.max()) + 1
    if (most := int(test.labels.max())) >= classes:
        raise UserError(f"{held_out} must have the classes of the training images, 0 to {classes - 1}, has {most}")
    warn_of_empty(data_dir / "train", train.labels, classes)
    return ImageFolder(train, test, tuple(map(str, range(classes))), name="webdataset")


def warn_of_empty(folder: Path, labels: Rows, classes: int) -> None:
    """Say that classes have no images: labels are taken as they are, so each is an output that is never right."""
    if len(empty := np.setdiff1d(np.arange(classes), labels)):
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        since = ", the labels begin at 1" if empty.tolist() == [0] else ""
        warnings.warn(
            f"{folder} has no image of class {empty[0]}{more}{since}: labels are taken as they are, so the network has "
            f"{classes} outputs, 0 to {classes - 1}",
            stacklevel=2,
        )


def split(folder: Path) -> TarImages:
    """Index the tars in a folder, in the order of their names."""
    tars = tuple(sorted(folder.glob("*.tar"))) if folder.is_dir() else ()
    if not tars:
        raise UserError(f"{folder} must hold tar files (*.tar, not compressed), has none: give their folder's parent")
    workers = min(len(tars), 16, usable_cpus())
    loader = torch_data.DataLoader(_Tars(tars), batch_size=None, num_workers=workers if workers > 1 else 0)
    found: list[Index] = []
    for index in alive(loader):
        if isinstance(index, UserError):
            raise index
        found.append(index)
    first = np.cumsum([0, *(len(index.labels) for index in found)], dtype=np.int64)
    offsets, sizes, labels = map(np.concatenate, zip(*found, strict=True))
    return TarImages(tars, first, offsets, sizes, labels)


class _Tars(torch_data.Dataset["Index | UserError"]):
    """Index tars in worker processes."""

    def __init__(self, tars: tuple[Path, ...]) -> None:
        self.tars = tars

    def __len__(self) -> int:
        return len(self.tars)

    def __getitem__(self, place: int) -> Index | UserError:
        try:
            return index_of(self.tars[place])
        except UserError as error:
            return error


def index_of(tar: Path) -> Index:
    """Index one tar; refuse samples without an image or a class."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with decode.open_regular(tar) as file, tarfile.open(fileobj=file, mode="r:") as opened:
            for member in opened:
                key, suffix = key_of(member.name)
                if not member.isfile() or os.path.basename(member.name).startswith("."):
                    continue
                if suffix == LABEL:
                    if key in labels:
                        raise ValueError(f"{key} has two classes")
                    labels[key] = label_in(file, member)
                elif suffix.endswith(SUFFIXES):
                    if key in images:
                        raise ValueError(f"{key} has two images")
                    images[key] = member.offset_data, member.size
    except (tarfile.TarError, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{tar}: not readable as a tar of images ({reason})") from error
    if odd := sorted(images.keys() ^ labels.keys()):
        lacks = "class (a .cls file)" if odd[0] in images else "image"
        raise UserError(f"{tar}: every sample must have an image and a class, {odd[0]} has no {lacks}")
    if not images:
        raise UserError(f"{tar} has no images")
    array = partial(np.array, dtype=np.int64)
    places = array(list(images.values()))
    return Index(places[:, 0], places[:, 1], array([labels[key] for key in images]))


def key_of(name: str) -> tuple[str, str]:
    """Split a member's name at the first dot of its last part: the sample, and what of it this is."""
    folder, _, last = name.rpartition("/")
    stem, dot, suffix = last.partition(".")
    return f"{folder}/{stem}" if folder else stem, (dot + suffix).lower()


def label_in(file: BinaryIO, member: tarfile.TarInfo) -> int:
    """Read a class; the position in the file, which the tar's reader keeps for itself, may change."""
    file.seek(member.offset_data)
    text = file.read(min(member.size, 32)).strip()
    if not text.isdigit() or int(text) >= MOST_CLASSES:
        raise ValueError(f"{member.name} must hold a whole number from 0 to {MOST_CLASSES - 1}, holds {text[:20]!r}")
    return int(text)
