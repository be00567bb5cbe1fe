"""Keep the memory that a training step frees: the next step wants the same again."""

from __future__ import annotations

import ctypes
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, LARGEST = -1, -3, 2**31 - 1


def keep_freed_memory() -> bool:
    """Ask glibc not to hand freed memory back to the kernel; True if it agreed.

    It does so after every backward pass by default, and the page faults of getting it back cost a CPU step up to
    a tenth of its time. Anywhere but on glibc this does nothing.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_TRIM_THRESHOLD, LARGEST)) and bool(mallopt(M_MMAP_THRESHOLD, LARGEST))
