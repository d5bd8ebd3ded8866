"""Facts about processes from the kernel: identities that are unique across machines, and the cores they may use.

A process id alone is not unique: it is reused after a while, and means another process in another container.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

_PROC = Path("/proc")
_BOOT = _PROC / "sys/kernel/random/boot_id"
MAX_TEXT = 300


@dataclass(frozen=True)
class Process:
    """A process.

    Attributes:
        boot: The kernel's id of this boot; "" if the system has none of this data, and then nothing is known.
        namespace: Inode of the PID namespace.
        started: Start time in clock ticks since the boot.
    """

    host: str
    boot: str
    namespace: int
    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """Return a running process of this PID namespace."""
        try:
            boot = _BOOT.read_text().strip()
            namespace = os.stat("/proc/self/ns/pid").st_ino
            started = _started(pid)
        except (OSError, ValueError, IndexError):
            return cls(socket.gethostname(), "", 0, pid, 0)
        return cls(socket.gethostname(), boot, namespace, pid, started)

    @classmethod
    def here(cls) -> Process:
        """Return this process."""
        return cls.of(os.getpid())

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Process:
        """Parse a process from a file. Raises KeyError or ValueError if the value is not a process."""
        for name, kind in (("host", str), ("boot", str), ("namespace", int), ("pid", int), ("started", int)):
            value = record[name]
            if type(value) is not kind or (isinstance(value, str) and len(value) > MAX_TEXT):
                raise ValueError(f"{name} is {value!r:.100}")
        return cls(*(record[name] for name in ("host", "boot", "namespace", "pid", "started")))

    def to_json(self) -> dict[str, Any]:
        """Return the form for a file."""
        return asdict(self)

    def same_machine(self, other: Process) -> bool:
        """Return True if both ran under one kernel. (Copies of a virtual machine share the boot id, not the name.)"""
        return bool(self.boot) and (self.host, self.boot) == (other.host, other.boot)

    def lives(self) -> bool | None:
        """Return True if it is running, and None if that cannot be seen from this process."""
        here = Process.here()
        if not self.same_machine(here) or self.namespace != here.namespace:
            return None
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass
        try:
            return _started(self.pid) == self.started and not _is_zombie(self.pid)
        except (OSError, ValueError, IndexError):  # it has just ended, or belongs to another user and is hidden
            return None


def fields_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the command, which may contain any bytes. Raises OSError."""
    return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _started(pid: int) -> int:
    return int(fields_of(pid)[19])


def _is_zombie(pid: int) -> bool:
    """Return True for a zombie. A process with a thread that is still blocked in the kernel has not ended."""
    return fields_of(pid)[0] in "ZX" and len(list((_PROC / str(pid) / "task").iterdir())) <= 1


def cores(proc: Path = _PROC, groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores that this process may use: of its affinity, or of its container's limit if smaller.

    Kubernetes limits CPUs by a quota of time, which the affinity does not show; Slurm by the affinity.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *_quotas(proc, groups)]))


def _quotas(proc: Path, groups: Path) -> Iterator[int]:
    """Yield the limits, in whole cores, of this process's control group (version 2) and the groups around it."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    group = PurePosixPath(next((line[3:] for line in lines if line.startswith("0::")), "/"))
    for path in (group, *group.parents):
        with suppress(OSError, ValueError):
            quota, period = (groups / str(path).lstrip("/") / "cpu.max").read_text().split()
            yield math.ceil(int(quota) / int(period))  # "max" without a limit: a ValueError
