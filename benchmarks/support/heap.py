"""Memory of this process that is in use, without what its allocators keep for later."""

from __future__ import annotations

import ctypes
import gc
import sys

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallocInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


def live_bytes() -> int:
    """Return the bytes that malloc has handed out and that were not freed: tensors, buffers, large Python objects.

    Needs glibc 2.33 or later.
    """
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _MallocInfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


def python_blocks() -> int:
    """Return the blocks of memory that Python's own allocator has handed out: one or a few for a small object."""
    gc.collect()
    return sys.getallocatedblocks()
