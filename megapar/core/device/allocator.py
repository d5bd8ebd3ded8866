"""The C library's allocator, asked to keep what is freed.

glibc maps every large allocation anew and gives it back when it is freed, so that a training step, which frees all of
its activations, has the kernel clear its memory page by page again and again.
"""

from __future__ import annotations

import ctypes
import os

# From malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_SET_BY_PEOPLE = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Large allocations come from what was freed before; True where the C library could be asked.

    What people have set in the environment stays as it is.
    """
    if any(name in os.environ for name in _SET_BY_PEOPLE):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_MMAP_MAX, 0) == 1 and mallopt(_TRIM_THRESHOLD, -1) == 1
