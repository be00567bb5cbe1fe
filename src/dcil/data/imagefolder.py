"""Read ImageNet, or any data in its layout: DATA_DIR/train/CLASS/*.jpg and DATA_DIR/val/CLASS/*.jpg."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from dcil.data import decode
from dcil.data.images import ImageFolder, Rows
from dcil.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm")
Identity = tuple[int, int]
"""Device and number of a folder, the same by whatever links it is reached."""


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

    def name(self, row: int) -> str:
        return str(self.path(row))

    def open(self, row: int) -> BinaryIO:
        return decode.open_regular(self.path(row))

    def order(self, random: np.random.Generator) -> Rows:
        return random.permutation(len(self))


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
