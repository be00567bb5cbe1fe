"""Read CIFAR-10 and CIFAR-100 in the binary layout that their authors publish.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009; https://www.cs.toronto.edu/~kriz/cifar.html.
A file is a sequence of records: one label byte (CIFAR-100: coarse, then fine), then the red, green and blue planes.

Images are normalised by each data set's own mean and deviation over all pixels. Much public code, the DCIL authors'
too, divides by (0.2023, 0.1994, 0.2010), the mean of the images' own deviations, and takes CIFAR-10's numbers for
CIFAR-100.
"""

from __future__ import annotations

import os
import tarfile
import textwrap
import zlib
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import torch

from dcil.data import download
from dcil.data.dataset import Dataset, Split
from dcil.errors import UserError

PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class File:
    """Name a file and its content: `digest` is the SHA-256 over the sorted SHA-256 digests of its records."""

    name: str
    records: int
    digest: str


@dataclass(frozen=True)
class Source:
    """Describe a data set: its folder, the archive it comes from, and the content of its files."""

    name: str
    folder: str
    url: str
    archive_hash: str
    label_bytes: int
    classes: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    train: tuple[File, ...]
    test: tuple[File, ...]


CIFAR10 = Source(
    name="cifar10",
    folder="cifar-10-batches-bin",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    archive_hash="md5:c32a1d4ab5d03f1284b67883e8d87530",
    label_bytes=1,
    classes=10,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    train=(
        File("data_batch_1.bin", 10000, "0efef7837b228bb74c943a59dd10c52bda8f0160643a850203f95ca68480b095"),
        File("data_batch_2.bin", 10000, "6f8061e7522c9cfee0c37f812237187d36269c805577ae091d3623b2f895d150"),
        File("data_batch_3.bin", 10000, "396e9019596f51c48b6f9c21ba995dbc557f47c2679ed742a5750930e29e609e"),
        File("data_batch_4.bin", 10000, "0f1060c63175cd67213130fd9fc90f821bc58cbfd6de3651ab76fadf1a886b63"),
        File("data_batch_5.bin", 10000, "0e4153d0f0bdef0371e3ab886103f35ce51735cce16c394eb34554f2e75d38cf"),
    ),
    test=(File("test_batch.bin", 10000, "325704b01eb92e1e2a6215ae6a916bb7db7de054af0c496be1c7be2e0fcfbf5f"),),
)

CIFAR100 = Source(
    name="cifar100",
    folder="cifar-100-binary",
    url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    archive_hash="md5:03b5dce01913d631647c71ecec9e9cb8",
    label_bytes=2,
    classes=100,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    train=(File("train.bin", 50000, "7077d87fc363f92dbf1245f13ba80561d7b33a96c79ad57168d49dc172aaa92b"),),
    test=(File("test.bin", 10000, "96adb3db8da7632dbb350559a17b9f585fab5b17675de5fc8f6761384196b294"),),
)


def load(source: Source, data_dir: Path, fetch: download.Fetch | None = download.fetch) -> Dataset:
    """Read the data set below `data_dir` and check every file; `fetch` downloads missing ones (None: an error)."""
    if data_dir.exists() and not data_dir.is_dir():
        raise UserError(f"the data directory must be a folder, got the file {data_dir}; choose another with --data-dir")
    folder = data_dir / source.folder
    missing = [file for file in source.train + source.test if not (folder / file.name).is_file()]
    if missing:
        _download(source, missing, data_dir, fetch)
    train, test = (_split(source, files, folder) for files in (source.train, source.test))
    return Dataset(source.name, train, test, source.classes, source.mean, source.std, pad=4, flip=True)


def read(path: Path, file: File, size: int) -> npt.NDArray[np.uint8]:
    """Read and check the records of one file, each `size` bytes, sorted by their SHA-256.

    Copies of CIFAR-100 exist in more than one record order. The check accepts every order, and sorting makes a seed
    give the same training run from every copy.
    """
    expected, found = file.records * size, path.stat().st_size
    if found != expected:
        raise UserError(f"{path} must have {expected} bytes, found {found}; delete it to download it again")
    records = np.fromfile(path, np.uint8).reshape(file.records, size)
    digests = [sha256(record.data).digest() for record in records]
    order = sorted(range(file.records), key=digests.__getitem__)
    if sha256(b"".join(digests[i] for i in order)).hexdigest() != file.digest:
        raise UserError(f"{path} must have the published content, found another; delete it to download it again")
    return records[order]


def _split(source: Source, files: tuple[File, ...], folder: Path) -> Split:
    size = source.label_bytes + PIXELS
    records = torch.from_numpy(np.concatenate([read(folder / file.name, file, size) for file in files]))
    images = records[:, source.label_bytes :].reshape(-1, 3, 32, 32).contiguous()
    return Split(images, records[:, source.label_bytes - 1].long())


def _download(source: Source, missing: list[File], data_dir: Path, fetch: download.Fetch | None) -> None:
    """Download the archive and move the missing files into place, each by an atomic rename."""
    folder = data_dir / source.folder
    where = f"put {', '.join(file.name for file in missing)} from {source.url} into {folder}"
    if fetch is None:
        raise UserError(f"{source.name} lacks files and downloads are off: {where}")
    try:
        with TemporaryDirectory() as scratch:
            archive = fetch(source.url, source.archive_hash, Path(scratch))
            data_dir.mkdir(parents=True, exist_ok=True)
            # Unpacked beside the final place, because a rename is atomic only within one file system.
            with TemporaryDirectory(dir=data_dir) as unpacked:
                download.extract(archive, [f"{source.folder}/{file.name}" for file in missing], Path(unpacked))
                folder.mkdir(exist_ok=True)
                for file in missing:
                    os.replace(Path(unpacked, file.name), folder / file.name)
    except (OSError, ValueError, KeyError, EOFError, tarfile.TarError, zlib.error) as error:
        reason = textwrap.shorten(str(error), 120)
        raise UserError(f"{source.name} could not be downloaded ({reason}): {where}") from error
