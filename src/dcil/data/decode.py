"""An image file as the pixels that a network sees: read, cropped and resized the way ImageNet is trained on.

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

from dcil.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[np.uint8]
Box = tuple[int, int, int, int]
"""Left, top, width and height in pixels."""

SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
TRIES = 10


def require_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise UserError("reading image files needs Pillow: pip install pillow") from error


def read(path: Path) -> Image:
    """The whole image in RGB; a file that cannot be decoded is a UserError that names it."""
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


def random_box(width: int, height: int, random: np.random.Generator) -> Box:
    """A part of uniform relative area and log-uniform width/height ratio; the centre where ten tries do not fit."""
    for _ in range(TRIES):
        area = width * height * random.uniform(*SCALE)
        ratio = math.exp(random.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = random.integers(height - h + 1), random.integers(width - w + 1)
            return int(left), int(top), w, h
    return centre_box(width, height)


def centre_box(width: int, height: int) -> Box:
    """The largest central part whose ratio is allowed."""
    w = min(width, round(height * RATIO[1]))
    h = min(height, round(width / RATIO[0]))
    return (width - w) // 2, (height - h) // 2, w, h


def augmented(image: Image, size: int, random: np.random.Generator) -> Pixels:
    """A random part of the image, resized to (size, size, 3) and mirrored half of the time."""
    from PIL import Image

    left, top, width, height = random_box(*image.size, random)
    part = image.crop((left, top, left + width, top + height)).resize((size, size), Image.Resampling.BILINEAR)
    pixels: Pixels = np.asarray(part)
    return pixels[:, ::-1] if random.random() < 0.5 else pixels


def central(image: Image, resize: int, crop: int) -> Pixels:
    """The central (crop, crop, 3) of the image resized so that its shorter side is `resize`."""
    from PIL import Image

    width, height = image.size
    short = min(width, height)
    width, height = resize * width // short, resize * height // short
    left, top = round((width - crop) / 2), round((height - crop) / 2)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(resized.crop((left, top, left + crop, top + crop)))
