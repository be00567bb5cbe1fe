"""Decode image files, and crop and resize them as is usual for ImageNet.

Training: Szegedy et al., "Going Deeper with Convolutions", 2015 (a crop of random area and shape, then a flip).
Testing: Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks", 2012 (the centre).
Rounding follows torchvision's RandomResizedCrop, Resize and CenterCrop, so that accuracies can be compared.
"""

from __future__ import annotations

import math
import textwrap
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dcil.errors import UserError, missing_extra

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[np.uint8]
Box = tuple[int, int, int, int]
"""Left, top, width and height in pixels."""

SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
TRIES = 10


def require_pillow() -> None:
    """Raise a UserError if Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing_extra("Pillow", "data") from error


def read(path: Path) -> Image:
    """Read an image as RGB; a file that cannot be decoded is a UserError that names it."""
    from PIL import Image

    try:
        # A few of ImageNet's files carry broken EXIF data, about which every worker would warn in every epoch.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(path)
            with image:
                return image.convert("RGB")
    except Exception as error:  # damaged files make the decoders raise nearly anything, SyntaxError included
        reason = str(error).removesuffix(f" {str(path)!r}") or type(error).__name__
        raise UserError(f"{path}: not readable as an image ({textwrap.shorten(reason, 120)})") from error


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
    width, height = resize * width // short, resize * height // short
    left, top = round((width - crop) / 2), round((height - crop) / 2)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(resized.crop((left, top, left + crop, top + crop)))
