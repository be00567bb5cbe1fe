"""Keep freed memory in the process: the next training step allocates the same again."""

from __future__ import annotations

import ctypes
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, LARGEST = -1, -3, 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc not to return freed memory to the operating system; return whether that worked.

    By default it does so after every backward pass, and the page faults of getting it back cost a CPU step up to
    a tenth of its time. Without glibc this does nothing.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_TRIM_THRESHOLD, LARGEST)) and bool(mallopt(M_MMAP_THRESHOLD, LARGEST))
