"""A process as others can recognize it: by machine, boot, PID namespace, number and the moment it was started.

A number alone names nobody: it is given again after a while, and means another process in another container.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_BOOT = _PROC / "sys/kernel/random/boot_id"
MAX_TEXT = 300


@dataclass(frozen=True)
class Process:
    """host: name of the machine. boot: its kernel's id of this boot. namespace: inode of the PID namespace. started: in
    clock ticks since the boot. boot is "" where a system says none of this: then nothing can be known of it.
    """

    host: str
    boot: str
    namespace: int
    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """A living process of this PID namespace."""
        try:
            boot = _BOOT.read_text().strip()
            namespace = os.stat("/proc/self/ns/pid").st_ino
            started = _started(pid)
        except (OSError, ValueError, IndexError):
            return cls(socket.gethostname(), "", 0, pid, 0)
        return cls(socket.gethostname(), boot, namespace, pid, started)

    @classmethod
    def here(cls) -> Process:
        """This process."""
        return cls.of(os.getpid())

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Process:
        """Of what a file holds. Raises KeyError or ValueError where it is no process."""
        for name, kind in (("host", str), ("boot", str), ("namespace", int), ("pid", int), ("started", int)):
            value = found[name]
            if type(value) is not kind or (isinstance(value, str) and len(value) > MAX_TEXT):
                raise ValueError(f"{name} is {value!r:.100}")
        return cls(*(found[name] for name in ("host", "boot", "namespace", "pid", "started")))

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)

    def same_machine(self, other: Process) -> bool:
        """Whether both ran under one kernel. (Copies of one virtual machine share the boot's id, not the name.)"""
        return bool(self.boot) and (self.host, self.boot) == (other.host, other.boot)

    def lives(self) -> bool | None:
        """Whether it is there; None where that cannot be seen from this process."""
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
            return _started(self.pid) == self.started and not _is_over(self.pid)
        except (OSError, ValueError, IndexError):  # it has just ended, or is another user's and hidden
            return None


def boot_id() -> str:
    """The kernel's id of this boot; "" where a system does not say."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def fields_of(pid: int) -> list[str]:
    """From the third field of /proc/PID/stat on: state, parent, ... Raises OSError where there is no such process.

    The second one is the command in parentheses, which may hold anything, bytes that are no text included.
    """
    return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _started(pid: int) -> int:
    return int(fields_of(pid)[19])


def _is_over(pid: int) -> bool:
    """Whether it has ended and nobody has asked how; while a thread of it is still stuck in the kernel it has not."""
    return fields_of(pid)[0] in "ZX" and len(list((_PROC / str(pid) / "task").iterdir())) <= 1


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
