"""Devices and memory of this machine, without torch."""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import suppress
from pathlib import Path


def no_device(kind: str) -> str:
    """Return the reason why this machine has no device of a kind (cpu, cuda or npu); "" if only torch can decide."""
    if kind == "npu" and importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    # torch opens this library by this name. AMD's devices, which torch also calls cuda, have a different driver.
    if kind == "cuda" and sys.platform == "linux" and not Path("/dev/kfd").exists() and not _loads("libcuda.so.1"):
        return "there is no GPU driver (libcuda.so.1)"
    return ""


def memory_bytes(root: Path = Path("/")) -> int:
    """Return the memory of this machine, or of this process's control group (v1 or v2) if that is less."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    table = root / "proc/self/cgroup"
    for line in table.read_text(encoding="utf-8").splitlines() if table.exists() else ():
        _, controllers, path = line.split(":", 2)
        top, file = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
        group = root / "sys/fs/cgroup" / top / path.strip("/")
        for folder in (group, *group.parents) if not controllers or "memory" in controllers.split(",") else ():
            with suppress(OSError, ValueError):  # "max", or a folder of another mount
                limits.append(int((folder / file).read_text(encoding="ascii")))
    return min(limits)


def _loads(library: str) -> bool:
    """Return True if a library can be opened. It is not queried: a process that has used the driver cannot fork."""
    import ctypes  # only if a GPU is requested, so that other starts do not pay for the import

    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
