"""Images per second of the loaders of images, beside torchvision's own: decoded, cropped, flipped and normalised.

Without a folder of images, JPEGs of ImageNet's usual size are made for it.
"""

from __future__ import annotations

import io
import json
import statistics
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from dcil.bench.clock import Stopwatch
from dcil.data import imagefolder, webdataset
from dcil.data.images import MEAN, STD, ImageFolder, Images
from dcil.runs.environment import environment
from dcil.runs.outputs import write_output_text

IMAGES, WIDTH, HEIGHT, QUALITY = 768, 500, 375, 90
OURS, TARS, THEIRS = "imagefolder", "webdataset", "torchvision"
#: Yields the number of images of each batch.
Loader = Callable[[], Iterator[int]]


def run(folder: Path | None, batch: int, workers: int, rounds: int, out: Path | None) -> None:
    """Measure the loaders in turns, an epoch each, and print the table."""
    console = Console()
    with ExitStack() as stack:
        made = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = make_images(made / "folder") if folder is None else folder
        images = replace(imagefolder.load(folder), workers=workers)
        make_tars(made / "tars", {"train": images.train, "val": images.test})
        tars = replace(webdataset.load(made / "tars"), workers=workers)
        loaders: dict[str, Loader] = {OURS: ours(images, batch), TARS: ours(tars, batch)}
        try:
            loaders[THEIRS] = torchvisions(folder / "train", images.crop, batch, workers)
        except (ImportError, RuntimeError) as error:
            console.print(f"without torchvision, which cannot be imported here: {error}", highlight=False)
        rates: dict[str, list[float]] = {name: [] for name in loaders}
        for _ in range(rounds):
            for name, loader in loaders.items():
                rates[name].append(images_per_second(loader))
    report(console, rates, {"images": len(images.train), "batch": batch, "workers": workers}, out)


def images_per_second(loader: Loader) -> float:
    """Return the rate from the first batch on, which the start of the workers delays."""
    batches = loader()
    next(batches)
    watch = Stopwatch()
    return sum(batches) / watch.seconds()


def report(console: Console, rates: dict[str, list[float]], how: dict[str, int], out: Path | None) -> None:
    table = Table("loader", "images / s", "x torchvision")
    medians = {name: statistics.median(found) for name, found in rates.items()}
    for name, rate in medians.items():
        table.add_row(name, f"{rate:.0f}", f"{rate / medians[THEIRS]:.2f}" if THEIRS in medians else "\N{EN DASH}")
    console.print(table)
    if out is not None:
        record = {"environment": environment(torch.device("cpu")), **how, "images_per_second": rates}
        write_output_text(out, json.dumps(record, indent=1) + "\n")


def ours(dataset: ImageFolder, batch: int) -> Loader:
    loader = dataset.loader(batch, "cpu", seed=0)
    return lambda: (len(labels) for _, labels in loader.train(0))


def torchvisions(folder: Path, crop: int, batch: int, workers: int) -> Loader:
    """Return the loader of torchvision's reference training, with the same number of workers."""
    from torchvision import datasets, transforms

    steps = [transforms.RandomResizedCrop(crop), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    steps.append(transforms.Normalize(MEAN, STD))
    loader = DataLoader(
        datasets.ImageFolder(str(folder), transforms.Compose(steps)), batch, shuffle=True, num_workers=workers
    )
    return lambda: (len(labels) for _, labels in loader)


def make_images(folder: Path) -> Path:
    """Write JPEGs of two classes: smooth noise, whose files are about as large as ImageNet's (110 kB)."""
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(IMAGES + 2):
        place = folder / ("train" if number < IMAGES else "val") / str(number % 2) / f"{number:05}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(random.integers(0, 256, (HEIGHT // 5, WIDTH // 5, 3), np.uint8))
        smooth = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.int16)
        grain = random.integers(-12, 13, smooth.shape)
        Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(place, quality=QUALITY)
    return folder


def make_tars(folder: Path, splits: dict[str, Images], size: int = 256) -> None:
    """Write the same images as tar files of ``size`` samples each."""
    for split, images in splits.items():
        (folder / split).mkdir(parents=True)
        for first in range(0, len(images), size):
            with tarfile.open(folder / split / f"{first:07}.tar", "w") as tar:
                for row in range(first, min(first + size, len(images))):
                    with images.open(row) as file:
                        add(tar, f"{row:07}.jpg", file.read())
                    add(tar, f"{row:07}.cls", b"%d" % images.labels[row])


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
