"""Parse the command line: argparse with one-line errors, and the readers of option values."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from dcil.errors import UserError, unknown
from dcil.runs.printable import printable
from dcil.train.method_settings import parse_value

#: --data-dir of the commands that train or evaluate a run.
DATA_DIR = Path("data")
DATA_DIR_HELP = "folder of the data sets; of --dataset text the file itself"

UNITS = {"s": 1, "m": 60, "h": 3600}


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line and name the option nearest to a mistyped one."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.option_strings and arg_strings == ["--"]:  # argparse would drop it and pass an empty list on
            raise argparse.ArgumentError(action, "must have a value, got '--'")
        return super()._get_values(action, arg_strings)

    def read_later(self, option: str) -> None:
        """Leave an option as its text, which the command reads when it knows the others."""
        self._option_string_actions[option].type = str

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        parsed, rest = self.parse_known_args(list(words))
        if rest:
            wrong = rest[0].partition("=")[0]
            if not wrong.startswith("-"):
                raise UserError(f"unexpected {wrong!r}; see {self.prog} --help")
            raise unknown("option", wrong, self._option_string_actions, nearest_only=True)
        return parsed


def add_damaged(parser: Parser, default: str | None = "fatal", only: str = "") -> None:
    """Add --damaged; ``only`` says for what it is, where that is not all that the command does."""
    parser.add_argument(
        "--damaged",
        choices=("fatal", "skip"),
        default=default,
        help=f"{only}an image that cannot be read ends the command, or is left out of its batch (fatal)",
    )


def say(text: str) -> None:
    """Print one line to standard output."""
    sys.stdout.write(printable(text) + "\n")


def filepath(text: str) -> Path:
    """Read the path of a file or folder; an empty one, such as an unset variable gives, is none."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"must be a path, got {text!r}")
    return Path(text)


def run_path(text: str) -> Path:
    """Read the path of run folders, which live by locks and renames that no object store has."""
    if scheme := re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise argparse.ArgumentTypeError(
            f"must be a path, got {text!r}: runs need file locks and atomic renames, which {scheme[0]}… does not have; "
            "use storage that is mounted, and copy finished runs"
        )
    return utf8_path(text)


def utf8_path(text: str) -> Path:
    """Read the path of a file or folder of weights: safetensors opens no path that is not UTF-8."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise argparse.ArgumentTypeError(f"must be a path in UTF-8, got {text!r}")
    return filepath(text)


def value_reader(kind: Any) -> Callable[[str], Any]:
    """Return the function that reads an option of type ``kind``."""

    def read(text: str) -> Any:
        try:
            return parse_value(kind, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


whole: Callable[[str], int] = value_reader(int)
number: Callable[[str], float] = value_reader(float)
epochs: Callable[[str], tuple[int, ...]] = value_reader(tuple[int, ...])


def up_to(most: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from 1 to ``most``."""

    def read(text: str) -> int:
        if not 1 <= (value := whole(text)) <= most:
            raise argparse.ArgumentTypeError(f"must be from 1 to {most}, got {text}")
        return value

    return read


def each_up_to(most: int) -> Callable[[str], tuple[int, ...]]:
    """Return a reader of comma-separated whole numbers from 1 to ``most``."""
    read = up_to(most)
    return lambda text: tuple(read(part) for part in text.split(","))


def minutes(text: str) -> float:
    """Read a time in minutes."""
    if not 0 <= (value := number(text)) <= 1e6:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1000000, got {text}")
    return value


def seconds(text: str) -> float:
    """Read a time such as 25m, 2h or 90s; a number without a unit is in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 25m, 2h or 90s")
    return float(match[1]) * UNITS[match[2] or "s"]


#: Reads a whole number >= 1.
positive = up_to(1_000_000)


def pair(text: str) -> tuple[str, str]:
    """Read NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name.replace("-", "_"), value


def device(name: str) -> torch.device:
    """Read the name of a torch device and check that it works on this machine."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
        if found.type == "cpu" and found.index:
            raise RuntimeError("there is one CPU device")
        torch.zeros(1, device=found).item()
    except Exception as error:  # a backend that is not built in raises nearly anything
        reason = (str(error).splitlines() or [type(error).__name__])[0].strip()
        raise argparse.ArgumentTypeError(
            f"must be a device of this machine, got {name} ({reason}); allowed: auto, cpu, cuda, cuda:N"
        ) from None
    return found
