"""Errors that name the file whose contents are wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dcil.errors import UserError

#: What reading text, JSON and the fields in it raises when a file was altered or cut short.
CONTENT_ERRORS = (ValueError, KeyError, TypeError, IndexError)

ANEW = "start the run anew"


class UnreadableFile(UserError):
    """A file is missing, cannot be read or holds something else than it should; the message names it."""


@contextmanager
def naming_file(
    file: Path | str,
    advice: str = ANEW,
    errors: tuple[type[BaseException], ...] = CONTENT_ERRORS,
    problem: str = "is damaged",
) -> Iterator[None]:
    """Turn ``errors`` raised while ``file`` is read into one line: file, what is wrong, the way out (``advice``).

    An error that an inner ``naming_file`` has raised passes unchanged: it names the file already.
    """
    try:
        yield
    except UnreadableFile:
        raise
    except FileNotFoundError:
        raise UnreadableFile(f"{file} is missing; {advice}") from None
    except OSError as error:
        raise UnreadableFile(f"{file} cannot be read: {error.strerror or error}") from None
    except errors as error:
        raise UnreadableFile(f"{file} {problem}: {_reason(error)}; {advice}") from None


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"field {error} is missing"
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON ({error})"
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
