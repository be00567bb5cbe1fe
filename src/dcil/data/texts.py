"""Read texts: any file, tiny Shakespeare, and one that comes with Python."""

from __future__ import annotations

import hashlib
import os
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory

from dcil.data.decode import open_regular
from dcil.data.download import Fetch
from dcil.data.text import MAX_BYTES, Text
from dcil.errors import UserError

#: Karpathy, "The Unreasonable Effectiveness of Recurrent Neural Networks", 2015: a million characters of the plays.
SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
PLACE = Path("tinyshakespeare", "input.txt")


def load_file(file: Path) -> Text:
    """Read any file as a text."""
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "is not a regular file" if file.exists() else "does not exist"
        raise UserError(
            f"--dataset text needs --data-dir FILE, the text itself, and {file} {what} (--dataset pydoc needs no file)"
        )
    return Text("text", os.fsencode(file.name).decode("utf-8", "replace"), read(file))


def read(file: Path) -> bytes:
    """Read a file; of one that is too large, no more than what shows it."""
    try:
        with open_regular(file) as opened:
            return opened.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def load_shakespeare(data_dir: Path, fetch: Fetch | None) -> Text:
    """Read tiny Shakespeare below ``data_dir`` and check it; ``fetch`` downloads it where it is missing."""
    if data_dir.exists() and not data_dir.is_dir():
        raise UserError(f"the data directory must be a folder, got the file {data_dir}; choose another with --data-dir")
    file = data_dir / PLACE
    if not file.is_file():
        download(file, fetch)
    content = read(file)
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise UserError(f"{file} must have the published content, found another; delete it to download it again")
    return Text("shakespeare", "tinyshakespeare/input.txt", content)


def download(file: Path, fetch: Fetch | None) -> None:
    """Download tiny Shakespeare and move it into place by an atomic rename."""
    where = f"put {SHAKESPEARE} into {file.parent}"
    if fetch is None:
        raise UserError(f"shakespeare lacks its file and downloads are off: {where}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Beside the final place, because a rename is atomic only within one file system.
        with TemporaryDirectory(dir=file.parent) as scratch:
            os.replace(fetch(SHAKESPEARE, f"sha256:{SHA256}", Path(scratch)), file)
    except (OSError, ValueError) as error:
        reason = textwrap.shorten(str(error), 120)
        raise UserError(f"shakespeare could not be downloaded ({reason}): {where}") from error


def load_pydoc() -> Text:
    """Return the texts of Python's own help, as this version of Python has them: nothing to download."""
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError as error:
        raise UserError("--dataset pydoc needs pydoc_data of the standard library, which this Python lacks") from error
    return Text("pydoc", "pydoc_data.topics", "\n".join(topics[name] for name in sorted(topics)).encode())
