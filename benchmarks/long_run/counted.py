"""``pretrain_moe.py`` that notes what rank 0 has in use, every few steps.

BENCHMARK_COUNTED='{"every": 40, "file": "counted.jsonl"}' ... benchmarks/long_run/counted.py FLAGS

A line of the file has the iteration, and what is in use without what allocators keep for later. It is written
before a step that is saved, when nothing of the last save is left.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import sys
from pathlib import Path
from typing import Any

from megapar.arguments import parse_or_exit
from megapar.trainer import Trainer, main

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


def count(every: int, file: Path) -> None:
    """Make the trainer note what is in use, on rank 0."""
    kept = Trainer.step

    def step(self: Trainer) -> Any:
        done = kept(self)
        iteration = self.progress.iteration
        if iteration % every == every - 1:
            line = {"iteration": iteration, "python_blocks": python_blocks()}
            line |= {"live_bytes": live_bytes(), "bytes_outside_heap": bytes_outside_heap()}
            with file.open("a") as lines:
                lines.write(json.dumps(line) + "\n")
        return done

    Trainer.step = step  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ.get("RANK", "0") == "0":
        wanted = json.loads(os.environ["BENCHMARK_COUNTED"])
        count(wanted["every"], Path(wanted["file"]))
    main(parse_or_exit("moe", sys.argv[1:]))
