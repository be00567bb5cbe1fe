"""Download an archive, check its hash and extract named files."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from dcil.errors import missing_extra

if TYPE_CHECKING:
    from rich.progress import Progress

Fetch = Callable[[str, str, Path], Path]
"""(URL, "algorithm:hash", folder) -> the checked file in that folder; raises OSError, or ValueError as UserError is."""


class _Bar:
    """Adapt rich's progress bar to the interface that pooch calls (`total`, `update`, `reset`, `close`)."""

    def __init__(self, progress: Progress, title: str) -> None:
        self.progress = progress
        self.task = progress.add_task(title, total=None)
        self.total = 0

    def update(self, amount: int) -> None:
        self.progress.update(self.task, total=self.total, advance=amount)

    def reset(self) -> None:
        self.progress.reset(self.task)

    def close(self) -> None:
        """Do nothing: the `Progress` is stopped by its context manager, also when the download fails."""


def fetch(url: str, known_hash: str, folder: Path) -> Path:
    """Download `url` into `folder` and check its hash."""
    try:
        import pooch
    except ModuleNotFoundError as error:
        raise missing_extra("pooch", "data") from error
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    name = url.rsplit("/", 1)[-1]
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        get = pooch.HTTPDownloader(progressbar=_Bar(progress, name), chunk_size=2**18)
        return Path(pooch.retrieve(url, known_hash, fname=name, path=folder, downloader=get))


def extract(archive: Path, members: Iterable[str], folder: Path) -> None:
    """Extract the named members of a tar archive, and nothing else, into `folder`; KeyError if one is missing.

    The name written is the last part of the name asked for, so no path inside the archive can lead out of `folder`.
    """
    with tarfile.open(archive) as tar:
        for member in members:
            content = tar.extractfile(member)
            if content is None:
                raise KeyError(f"{member} is not a file")
            with content, open(folder / Path(member).name, "wb") as out:
                shutil.copyfileobj(content, out)
