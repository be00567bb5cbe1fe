"""Decode image files, and crop and resize them as is usual for ImageNet.

Of animations the first frame counts; transparency and the EXIF orientation are ignored, as torchvision does.

Training: Szegedy et al., "Going Deeper with Convolutions", 2015 (a crop of random area and shape, then a flip).
Testing: Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks", 2012 (the centre).
Rounding follows torchvision's RandomResizedCrop, Resize and CenterCrop, so that accuracies can be compared.
"""

from __future__ import annotations

import math
import os
import stat
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt

from dcil.errors import UserError, missing_extra

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[np.uint8]
Box = tuple[int, int, int, int]
"""Left, top, width and height in pixels."""

#: What is looked for in a file, whatever its name: Pillow's other decoders include some that run programs.
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "GIF")
#: What the files of two formats end with, and how far from the end it is looked for.
ENDS, TAIL = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}, 4096
#: The most pixels of an image: decoding takes up to 12 bytes for each.
MAX_PIXELS = 50_000_000
#: The longest side: Pillow holds a pointer for every row.
MAX_SIDE = 2**18
#: The most scans of a progressive JPEG (usual are 10): each costs as much time as the whole image.
MAX_SCANS = 100
#: How many times longer than its shorter side an image is resized as a whole.
LONGEST = 16
SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
TRIES = 10


def require_pillow() -> None:
    """Raise a UserError if Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing_extra("Pillow", "data") from error


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Turn what reading the image called ``name`` raises into a UserError in one line."""
    try:
        # A few of ImageNet's files carry broken EXIF data, about which every worker would warn in every epoch.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # damaged files make the decoders raise nearly anything, SyntaxError included
        reason = getattr(error, "strerror", None) or str(error).partition(" <_io.")[0] or type(error).__name__
        raise UserError(f"{name}: not readable as an image ({textwrap.shorten(reason, 120)})") from error


def read(path: Path, max_pixels: int = MAX_PIXELS) -> Image:
    """Read an image as RGB; a file that cannot be decoded is a UserError that names it."""
    with naming(str(path)):
        return read_open(open_regular(path), max_pixels)


def read_open(file: BinaryIO, max_pixels: int) -> Image:
    """Read an image as RGB, and close its file."""
    from PIL import Image

    with file, Image.open(file, formats=FORMATS) as image:
        check_size(image, file, max_pixels)
        image.load()
        return to_rgb(image)


def check_ends(file: BinaryIO, max_pixels: int) -> None:
    """Check the header of an image and how its file ends, and close it; what may be cut short is decoded."""
    from PIL import Image

    with file:
        with Image.open(file, formats=FORMATS) as image:
            check_size(image, file, max_pixels)
            mark = ENDS.get(image.format or "")
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            whole = mark is not None and mark in file.read()
            file.seek(0)
        if not whole:
            read_open(file, max_pixels)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file; opening a FIFO would wait for ever."""
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ValueError("not a regular file")
    return os.fdopen(file, "rb")


def check_size(image: Image, file: BinaryIO, max_pixels: int) -> None:
    """Refuse, by its header, an image that would take too much memory or time to decode."""
    width, height = image.size
    if max(width, height) > MAX_SIDE:
        raise ValueError(f"{width} x {height} pixels, no side may have more than {MAX_SIDE:,}: cut it")
    if width * height > max_pixels:
        raise ValueError(f"{width} x {height} pixels, more than {max_pixels:,}: make it smaller")
    if image.info.get("progressive"):
        place, scans, rest = file.tell(), 0, b""
        file.seek(0)
        while (part := file.read(2**20)) and scans <= MAX_SCANS:
            scans += (rest + part).count(b"\xff\xda")
            rest = part[-1:]
        file.seek(place)
        if scans > MAX_SCANS:
            raise ValueError(f"a progressive JPEG of more than {MAX_SCANS} scans: save it anew")


def to_rgb(image: Image) -> Image:
    """Convert to RGB; of 16-bit grey the high byte counts, as the decoders have it for 16-bit colours."""
    from PIL import Image

    if image.mode == "F":
        raise ValueError("floating-point pixels have no range: save it with 8 or 16 bits")
    if image.mode.startswith("I"):  # Pillow would clip it at 255
        grey = (np.asarray(image).clip(0, 2**16 - 1) >> 8).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def random_crop_box(width: int, height: int, random: np.random.Generator) -> Box:
    """Draw a box of uniform relative area and log-uniform aspect ratio; the centre if ten draws do not fit."""
    for _ in range(TRIES):
        area = width * height * random.uniform(*SCALE)
        ratio = math.exp(random.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = random.integers(height - h + 1), random.integers(width - w + 1)
            return int(left), int(top), w, h
    return center_crop_box(width, height)


def center_crop_box(width: int, height: int) -> Box:
    """Return the largest central box whose aspect ratio is allowed."""
    w = min(width, round(height * RATIO[1]))
    h = min(height, round(width / RATIO[0]))
    return (width - w) // 2, (height - h) // 2, w, h


def random_resized_crop(image: Image, size: int, random: np.random.Generator) -> Pixels:
    """Resize a random part of the image to (size, size, 3) and flip it horizontally with probability 1/2."""
    from PIL import Image

    left, top, width, height = random_crop_box(*image.size, random)
    part = image.crop((left, top, left + width, top + height)).resize((size, size), Image.Resampling.BILINEAR)
    pixels: Pixels = np.asarray(part)
    return pixels[:, ::-1] if random.random() < 0.5 else pixels


def center_crop(image: Image, resize: int, crop: int) -> Pixels:
    """Resize the image so that its shorter side is `resize`, and cut out the central (crop, crop, 3)."""
    from PIL import Image

    width, height = image.size
    short = min(width, height)
    wide, high = resize * width // short, resize * height // short
    left, top = round((wide - crop) / 2), round((high - crop) / 2)
    if max(wide, high) <= LONGEST * resize:
        resized = image.resize((wide, high), Image.Resampling.BILINEAR)
        return np.asarray(resized.crop((left, top, left + crop, top + crop)))
    # Of so long an image only the centre is resized: the same pixels but for the rounding, by one level of 256 at most.
    x, y = width / wide, height / high
    box = (left * x, top * y, min(width, (left + crop) * x), min(height, (top + crop) * y))
    return np.asarray(image.resize((crop, crop), Image.Resampling.BILINEAR, box))
