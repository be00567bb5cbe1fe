"""Reading words: argparse that complains in one line, and the ways flags are read."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import torch

from dcil.errors import UserError, unknown

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """argparse without usage dumps; knows the nearest name of a mistyped option."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        parsed, rest = self.parse_known_args(list(words))
        if rest:
            wrong = rest[0].partition("=")[0]
            if not wrong.startswith("-"):
                raise UserError(f"unexpected {wrong!r}; see {self.prog} --help")
            raise unknown("option", wrong, self._option_string_actions, nearest_only=True)
        return parsed


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


def whole(text: str) -> int:
    return _number(int, text, "a whole number")


def positive(text: str) -> int:
    if (value := whole(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def number(text: str) -> float:
    return _number(float, text, "a number")


def _number(kind: Callable[[str], T], text: str, what: str) -> T:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None


def epochs(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of epochs such as 150,225") from None


def pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name.replace("-", "_"), value


def device(name: str) -> torch.device:
    """A torch device that really works here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
        torch.zeros(1, device=found).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].strip()
        raise argparse.ArgumentTypeError(
            f"{name} cannot be used here ({reason}); allowed: auto, cpu, cuda, cuda:N"
        ) from None
    return found
