"""Load handwritten digits, 1797 grey images of 8x8 pixels, from scikit-learn's package: nothing to download.

Alpaydin & Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
"""

from __future__ import annotations

import numpy as np
import torch

from dcil.data.dataset import Dataset, Split
from dcil.errors import missing_extra


def load() -> Dataset:
    """Load the digits; every fifth image (index % 5 == 0) is a test image, the 17 grey levels are scaled to 0..255."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise missing_extra("scikit-learn", "data") from error
    raw = load_digits()
    images = torch.from_numpy(np.rint(raw.images * (255 / 16)).astype(np.uint8)).unsqueeze(1)
    labels = torch.from_numpy(raw.target.astype(np.int64))
    held_out = torch.arange(len(labels)) % 5 == 0
    train = Split(images[~held_out], labels[~held_out])
    scaled = train.images.double() / 255
    return Dataset(
        name="digits",
        train=train,
        test=Split(images[held_out], labels[held_out]),
        classes=10,
        mean=(round(scaled.mean().item(), 4),),
        std=(round(scaled.std(correction=0).item(), 4),),
        pad=1,
        flip=False,  # a mirrored digit is not a digit
    )
