"""Load the data sets by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dcil import errors
from dcil.data import cifar, digits, imagefolder
from dcil.data.batches import Batches, ImageData
from dcil.data.dataset import Dataset, Split
from dcil.data.download import Fetch, fetch
from dcil.data.imagefolder import ImageFolder
from dcil.data.loader import Loader

__all__ = ["DATASETS", "Batches", "Dataset", "ImageData", "ImageFolder", "Loader", "Split", "load", "names"]

DATASETS: dict[str, Callable[[Path, Fetch | None], ImageData]] = {
    "digits": lambda data_dir, fetch: digits.load(),
    "cifar10": lambda data_dir, fetch: cifar.load(cifar.CIFAR10, data_dir, fetch),
    "cifar100": lambda data_dir, fetch: cifar.load(cifar.CIFAR100, data_dir, fetch),
    "imagefolder": lambda data_dir, fetch: imagefolder.load(data_dir),
}


def names() -> list[str]:
    """Return the names that `load` takes."""
    return list(DATASETS)


def load(name: str, data_dir: Path, download: bool = True) -> ImageData:
    """Load the data set `name` from below `data_dir`; with `download`, missing files are downloaded to there."""
    if name not in DATASETS:
        raise errors.unknown("dataset", name, DATASETS)
    return DATASETS[name](Path(data_dir), fetch if download else None)
