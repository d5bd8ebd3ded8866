"""Memory of this process that is in use, without what its allocators keep for later."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from pathlib import Path

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallocInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


def live_bytes() -> int:
    """Return the bytes that malloc has handed out and that were not freed: tensors, buffers, large Python objects.

    Needs glibc 2.33 or later.
    """
    info = _malloc_info()
    return int(info.uordblks + info.hblkhd)


def bytes_outside_heap() -> int:
    """Return the resident bytes that do not belong to malloc: code, small Python objects, mapped files and memory."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    info = _malloc_info()
    return resident - int(info.arena + info.hblkhd)


def _malloc_info() -> _MallocInfo:
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _MallocInfo
    info = mallinfo()
    assert isinstance(info, _MallocInfo)
    return info


def python_blocks() -> int:
    """Return the blocks of memory that Python's own allocator has handed out: one or a few for a small object."""
    gc.collect()
    return sys.getallocatedblocks()
