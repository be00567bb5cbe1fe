"""Load the data sets by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dcil import errors
from dcil.data import cifar, digits, imagefolder, texts, webdataset
from dcil.data.batches import Batches, TrainingData
from dcil.data.dataset import Dataset, Split
from dcil.data.download import Fetch, fetch
from dcil.data.image_check import CHECKS, find_damaged, refuse_damaged
from dcil.data.images import ImageFolder
from dcil.data.loader import Loader
from dcil.data.text import TOKENS, Sequences, Text, TextLoader

__all__ = [
    "CHECKS",
    "DATASETS",
    "IMAGES_IN_FILES",
    "TEXTS",
    "TOKENS",
    "Batches",
    "Dataset",
    "ImageFolder",
    "Loaded",
    "Loader",
    "Sequences",
    "Split",
    "Text",
    "TextLoader",
    "TrainingData",
    "find_damaged",
    "load",
    "names",
    "prepare",
    "refuse_damaged",
    "skipping",
]

#: What is loaded: images as they are trained on, or a text that is still to be cut into sequences.
Loaded = TrainingData | Text
DATASETS: dict[str, Callable[[Path, Fetch | None], Loaded]] = {
    "digits": lambda data_dir, fetch: digits.load(),
    "cifar10": lambda data_dir, fetch: cifar.load(cifar.CIFAR10, data_dir, fetch),
    "cifar100": lambda data_dir, fetch: cifar.load(cifar.CIFAR100, data_dir, fetch),
    "imagefolder": lambda data_dir, fetch: imagefolder.load(data_dir),
    "webdataset": lambda data_dir, fetch: webdataset.load(data_dir),
    "text": lambda data_dir, fetch: texts.load_file(data_dir),
    "shakespeare": texts.load_shakespeare,
    "pydoc": lambda data_dir, fetch: texts.load_pydoc(),
}
#: Those of them whose images are decoded from files as they are needed.
IMAGES_IN_FILES = ("imagefolder", "webdataset")
#: Those of them that are texts.
TEXTS = ("text", "shakespeare", "pydoc")


def names() -> list[str]:
    """Return the names that `load` takes."""
    return list(DATASETS)


def load(name: str, data_dir: Path, download: bool = True) -> Loaded:
    """Load the data set `name` from below `data_dir`; with `download`, missing files are downloaded to there.

    That of `text` is the file `data_dir` itself.
    """
    if name not in DATASETS:
        raise errors.unknown("dataset", name, DATASETS)
    return DATASETS[name](Path(data_dir), fetch if download else None)


def skipping(loaded: Loaded, skip: bool) -> Loaded:
    """Return the data set as one that leaves out damaged images, or ends with them, if it reads images from files."""
    return replace(loaded, skip_damaged=skip) if isinstance(loaded, ImageFolder) else loaded


def prepare(loaded: Loaded, tokens: str, length: int) -> TrainingData:
    """Return what a run trains on: of a text, sequences of `length` `tokens` ("characters" or "bytes") each."""
    return loaded.sequences(tokens, length) if isinstance(loaded, Text) else loaded
