"""The clean process of a node, of which its ranks are forks.

    python -u .../own.py megapar.tools.launcher.fresh SOCKET LAUNCHER MODULES...

It has imported what ranks need, and nothing else has happened in it: no thread, no device, no group. A rank is forked
from its main thread, over a process between that ends at once, so that the kernel gives the rank to the launcher, which
asks for such orphans while it starts ranks: signals, statuses and the end with the launcher are those of a rank that
the launcher has started itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megapar.core.health.parent import die_with_parent
from megapar.core.health.signal_listener import write_stderr

MODULES = ("megapar.trainer", "megapar.planning.held", "numpy.ma", "yaml")
DEVICES = ("/dev/nvidia", "/dev/davinci")
ONE_THREAD = "OPENBLAS_NUM_THREADS"  # NumPy's library starts its threads when it is imported
_MOST_MESSAGE = 1 << 24


def send(to: socket.socket, told: Mapping[str, Any], files: Sequence[int] = ()) -> None:
    """A message with open files. Raises OSError."""
    body = json.dumps(told).encode()
    head = len(body).to_bytes(8, "big")
    socket.send_fds(to, [head], list(files)) if files else to.sendall(head)
    to.sendall(body)


def receive(source: socket.socket, most_files: int = 0) -> tuple[dict[str, Any], list[int]]:
    """A message and its files. Raises EOFError where the other end is gone, and OSError."""
    head, files, _, _ = socket.recv_fds(source, 8, most_files)
    size = int.from_bytes(head, "big")
    if len(head) < 8 or size > _MOST_MESSAGE:
        raise EOFError
    body = bytearray()
    while len(body) < size:
        part = source.recv(size - len(body))
        if not part:
            raise EOFError
        body += part
    return json.loads(body), files


def unclean() -> str:
    """What a fork of this process would spoil, or ""."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"{threads} threads after the imports"
    opened = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            opened.append(os.readlink(link))
    devices = [name for name in opened if name.startswith(DEVICES)]
    return f"{devices[0]} open after the imports" if devices else ""


def main(argv: Sequence[str]) -> None:
    """Import, and fork ranks until the launcher is gone; comes back in ranks alone, once their script has ended."""
    # Not of a terminal's foreground: Ctrl-C is the launcher's to hear. Not of a session of its own: ranks are.
    with contextlib.suppress(PermissionError):  # it leads a session, and so a group
        os.setpgid(0, 0)
    die_with_parent()
    wire, launcher = socket.socket(fileno=int(argv[0])), int(argv[1])
    interrupts = signal.getsignal(signal.SIGINT)
    if interrupts is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for name in argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a rank would copy the pages of all that is imported
    request, files = _serve(wire, launcher)
    wire.close()
    signal.signal(signal.SIGINT, interrupts)
    _be_rank(request["environ"], files)
    run(request["arguments"])


def _serve(wire: socket.socket, launcher: int) -> tuple[dict[str, Any], list[int]]:
    """Fork a rank for every request; comes back in the ranks alone, with theirs."""
    with contextlib.suppress(EOFError, OSError):
        send(wire, {"unclean": unclean()})
        while True:
            request, files = receive(wire, 2)
            pid = _fork(launcher)
            if pid is None:
                return request, files
            for file in files:
                os.close(file)
            send(wire, {"pid": pid})
    os._exit(0)


def _fork(launcher: int) -> int | None:
    """The number of a new process, a child of the launcher with a session of its own; None in that process."""
    told, tells = os.pipe()
    waits, go = os.pipe()
    between = os.fork()
    if not between:
        if os.fork():
            os._exit(0)
        os.setsid()  # before its number is known: who leads no session is no rank, and hears no signal (stopper.py)
        os.write(tells, str(os.getpid()).encode())
        for end in (told, tells, go):
            os.close(end)
        started = os.read(waits, 1)
        os.close(waits)
        if not started or os.getppid() != launcher:
            write_stderr(
                f"process {os.getpid()} ends: it was to be a rank of process {launcher}, which is not its parent"
            )
            os._exit(1)
        return None
    os.close(tells)
    os.close(waits)
    try:
        pid = int(os.read(told, 32))
        os.waitpid(between, 0)  # from here on the rank is the launcher's
        os.write(go, b"!")
    finally:
        os.close(told)
        os.close(go)
    return pid


def _be_rank(environ: Mapping[str, str], files: Sequence[int]) -> None:
    """Output, environment and random numbers of a process of its own."""
    for descriptor, file in enumerate(files, 1):
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(environ)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def run(arguments: Sequence[str]) -> None:
    """What ``python ARGUMENTS`` does, in this process, which has no folder of its own first on sys.path (own.py);
    arguments: [-u] SCRIPT FLAGS...
    """
    line = [*arguments[1:]] if arguments[0] == "-u" else [*arguments]
    sys.orig_argv = [sys.executable, *arguments]
    sys.argv = line
    if not getattr(sys.flags, "safe_path", False):  # from Python 3.11 on
        sys.path.insert(0, os.path.dirname(os.path.realpath(line[0])))
    runpy.run_path(line[0], run_name="__main__")


def become(arguments: Sequence[str]) -> None:
    """Go on as ``python ARGUMENTS``: in this process where it was forked with the imports done, else in a new image."""
    if all(name in sys.modules for name in MODULES):
        run(arguments)
        sys.exit(0)
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
