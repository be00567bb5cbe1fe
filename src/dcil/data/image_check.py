"""Check images before a training: all that cannot be read are named at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch.utils import data as torch_data

from dcil.data import decode
from dcil.data.images import ImageFolder, Images, Rows, alive
from dcil.errors import UserError

#: How thoroughly: by header and end of every file, by decoding every image, or not at all.
CHECKS = ("ends", "all", "none")
CHUNK, SHOWN = 256, 5


def find_damaged(dataset: ImageFolder, decoding: bool, part: int = 0, parts: int = 1) -> list[str]:
    """Return why images of either split cannot be read, by header and end of their files or by ``decoding`` them.

    Of several ``parts`` of the images, ``part`` is looked at.
    """
    found: list[str] = []
    for files in (dataset.train, dataset.test):
        chunks = np.array_split(np.arange(len(files)), -(-len(files) // CHUNK))[part::parts]
        loader = torch_data.DataLoader(
            _Checker(files, dataset.max_pixels, decoding),
            batch_size=None,
            sampler=chunks,
            num_workers=min(dataset.workers, len(chunks)),
        )
        for reasons in alive(loader):
            found += reasons
    return found


def refuse_damaged(found: Sequence[str]) -> None:
    """Refuse images that cannot be read, if any were found, in one line."""
    if found:
        more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise UserError(
            f"{'; '.join(found[:SHOWN])}{more}: mend or remove {'them' if len(found) > 1 else 'it'}, or leave such "
            "images out with --damaged skip"
        )


class _Checker(torch_data.Dataset[list[str]]):
    """Return what is wrong with the images at given indices, in the worker processes."""

    def __init__(self, files: Images, max_pixels: int, decoding: bool) -> None:
        self.files, self.max_pixels = files, max_pixels
        self.check = decode.read_open if decoding else decode.check_ends

    def __getitem__(self, rows: Rows) -> list[str]:
        reasons = (self.reason(row) for row in rows.tolist())
        return [reason for reason in reasons if reason is not None]

    def reason(self, row: int) -> str | None:
        try:
            with decode.naming(self.files.name(row)):
                self.check(self.files.open(row), self.max_pixels)
        except UserError as error:
            return str(error)
        return None
