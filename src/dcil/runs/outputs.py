"""Outputs: files that a user names. They may replace older outputs, never a file of a run, a record or an image."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

from dcil.errors import UserError
from dcil.runs.atomic import CannotWrite, write_atomically

#: Files of a run folder; no other file there belongs to the run.
RUN_FILES: tuple[str, ...] = ("config.json", "metrics.jsonl", "summary.json", "sessions.jsonl", ".lock", ".*.part")
RUN_FILES += ("checkpoint.json", "checkpoint.safetensors", "checkpoint-parts", "model.safetensors")
RUN_FILES += ("at[0-9]*.safetensors", "watch-*.safetensors")
#: Any of them makes a folder a run folder, also if its config.json is lost.
MARKS = ("metrics.jsonl", "checkpoint.safetensors", "checkpoint.json")
#: How the formats begin that nobody but dcil reads, and that cannot be made again in a moment.
FORMATS = ("dcil checkpoint", "dcil record", "dcil iterations")
IMAGES = (b"\x89PNG\r\n", b"\xff\xd8\xff")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
DATA_FOLDERS = ("cifar-10-batches-bin", "cifar-100-binary")
SNIFFED = 2**20  # bytes
LARGEST_HEADER = 100_000_000  # bytes that safetensors itself accepts; notes stand there in any order


def write_output(path: Path, write: Callable[[Path], object]) -> None:
    """Write to ``path`` atomically, as ``write_atomically`` does, unless it must not be replaced."""
    check_output(path)
    write_atomically(path, write)


def write_output_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` as ``write_output`` does."""
    write_output(path, lambda draft: draft.write_text(text, encoding="utf-8"))


def check_output(path: Path) -> None:
    """Refuse a target that is no ordinary file, or is one that must not be replaced."""
    try:
        if path.is_dir():
            raise UserError(f"{path} is a folder; give the name of a file")
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not an ordinary file and is left alone")
        # The name as given and what it leads to: a link in a run folder is a file of the run, as is its target.
        for place in {path.parent.resolve() / path.name, path.resolve()}:
            check_place(path, place)
    except OSError as error:
        raise CannotWrite.at(path, error) from None
    except RuntimeError:  # links in a circle, before Python 3.13
        raise UserError(f"cannot write {path}: its links lead in a circle") from None


def check_place(path: Path, place: Path) -> None:
    """Refuse ``place``, which ``path`` leads to, if it is a file of a run, a record or an image of a data set."""
    check_run_files(path, place)
    if not place.is_file():
        return
    if kind := kind_of(place):
        raise UserError(f"{path} is {kind}, which is kept; give another name")


def check_run_files(path: Path, place: Path) -> None:
    """Refuse ``place``, which ``path`` leads to, if it is or lies below the name of a file of a run."""
    for each in (place, *place.parents):
        if is_run_file(each.name) and is_run_folder(each.parent):
            raise UserError(f"{path} is a file of the run itself ({each.parent}), which is kept; give another name")


def is_run_file(name: str) -> bool:
    """Return whether a file of this name belongs to the run in whose folder it is."""
    return any(fnmatch(name, pattern) for pattern in RUN_FILES)


def is_run_folder(folder: Path) -> bool:
    """Return whether a run was begun in ``folder``; other programs have a config.json too."""
    file = folder / "config.json"
    if any(os.path.lexists(folder / name) for name in MARKS):
        return True
    if not os.path.lexists(file):
        return False
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return True  # rather too careful than a run lost
    return isinstance(config, dict) and {"method", "dataset", "total_epochs"} & set(config) != set()


def kind_of(file: Path) -> str:
    """Return what ``file`` is, in words, if it must be kept, else an empty text."""
    with file.open("rb") as opened:
        start = opened.read(SNIFFED)
        start += opened.read(max(0, header_end(start) - len(start)))
    if start.startswith(IMAGES) or (start and file.suffix.lower() in SUFFIXES):
        return "an image"
    if start and file.parent.name in DATA_FOLDERS:
        return "a file of a data set"
    if form := format_of(start):
        return f"a {form.removeprefix('dcil ').rstrip(' 0123456789')} file of dcil"
    return ""


def header_end(start: bytes) -> int:
    """Return where the header of a safetensors file ends, 0 if the file is none: its length, then itself."""
    return 8 + min(int.from_bytes(start[:8], "little"), LARGEST_HEADER) if start[8:9] == b"{" else 0


def format_of(start: bytes) -> str:
    """Return the format of a file that only dcil writes, from its first bytes, else an empty text."""
    if end := header_end(start):
        start = start[8:end]
    elif not start.lstrip().startswith(b"{"):
        return ""
    compact = start.replace(b'": "', b'":"')
    return next((form for form in FORMATS if f'"format":"{form}'.encode() in compact), "")
