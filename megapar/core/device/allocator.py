"""Setting of the C library's allocator to keep freed memory.

glibc maps every large allocation separately and unmaps it when it is freed. A training step frees all of its
activations, so the kernel would clear the same memory page by page in every step.
"""

from __future__ import annotations

import ctypes
import os

# From malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_USER_SETTINGS = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Serve large allocations from freed memory. Returns True if the C library accepted the setting.

    Settings of the user in the environment take precedence.
    """
    if any(name in os.environ for name in _USER_SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_MMAP_MAX, 0) == 1 and mallopt(_TRIM_THRESHOLD, -1) == 1
