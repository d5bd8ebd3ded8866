"""What is freed is there for the next allocation."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from megapar.core.device.base import keep_freed_memory
print(int(keep_freed_memory()))
for _ in range(24):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(12 << 20)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> list[int]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    run = subprocess.run(
        [sys.executable, "-c", FAULTS], env={**plain, **environment}, capture_output=True, text=True, check=True
    )
    return [int(line) for line in run.stdout.split()]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library")
def test_memory_is_cleared_once() -> None:
    kept, first, *later = faults()
    assert kept == 1
    # An aligned request asks for a little more than it keeps: it is some blocks until a freed one is large enough.
    assert max(later[-8:]) < first / 10


def test_what_people_have_set_stays() -> None:
    # 48 MiB is above the size up to which glibc learns by itself to keep what is freed.
    kept, first, *later = faults(MALLOC_TRIM_THRESHOLD_="1000000")
    assert kept == 0
    assert min(later) > first / 2
