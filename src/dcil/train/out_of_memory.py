"""Running out of memory: one line that says what to reduce."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dcil.errors import UserError

#: What torch, its libraries and the C++ runtime say when an allocation fails.
SAID: tuple[str, ...] = ("out of memory", "not enough memory", "can't allocate memory", "Cannot allocate memory")
SAID += ("failed to allocate", "could not allocate", "unable to mmap", "bad_alloc", "bad alloc", "ALLOC_FAILED")


class OutOfMemory(UserError):
    """The memory of the host or of the device does not suffice."""

    exit_code = 1


@contextmanager
def naming_what_to_reduce(advice: str) -> Iterator[None]:
    """Turn an allocation that fails into one line that ends with ``advice``."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        where = "the GPU's memory" if isinstance(error, torch.OutOfMemoryError) or "CU" in str(error) else "memory"
        raise OutOfMemory(f"{where} does not suffice; {advice}") from None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` is how Python, torch or the operating system report a failed allocation."""
    if isinstance(error, UserError):
        return False
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(word in str(error) for word in SAID)
