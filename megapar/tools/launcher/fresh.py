"""The clean process of a node, from which its ranks are forked.

    python -u .../run_module.py megapar.tools.launcher.fresh SOCKET LAUNCHER MODULES...

It has imported the modules that ranks need and done nothing else: it has no threads, open devices or process groups.
A rank is forked twice:

    clean process -> intermediate process, exits at once -> rank

The launcher adopts orphans while it starts ranks, so the kernel makes it the parent of the rank. The rank therefore
gets its signals, reports its status and ends with the launcher as if the launcher had started it directly.
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

from megapar.health.stop.parent import die_with_parent
from megapar.health.stop.signal_listener import write_stderr

MODULES = ("megapar.trainer", "numpy.ma", "yaml")
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/davinci")
ONE_THREAD = "OPENBLAS_NUM_THREADS"  # NumPy's OpenBLAS starts its threads at import
_MAX_MESSAGE_BYTES = 1 << 24


def send(to: socket.socket, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
    """Send a message and open file descriptors. Raises OSError."""
    body = json.dumps(message).encode()
    head = len(body).to_bytes(8, "big")
    socket.send_fds(to, [head], list(files)) if files else to.sendall(head)
    to.sendall(body)


def receive(source: socket.socket, max_files: int = 0) -> tuple[dict[str, Any], list[int]]:
    """Receive a message and its file descriptors. Raises EOFError if the other end is closed, and OSError."""
    head, files, _, _ = socket.recv_fds(source, 8, max_files)
    size = int.from_bytes(head, "big")
    if len(head) < 8 or size > _MAX_MESSAGE_BYTES:
        raise EOFError
    body = bytearray()
    while len(body) < size:
        part = source.recv(size - len(body))
        if not part:
            raise EOFError
        body += part
    return json.loads(body), files


def unclean() -> str:
    """Return why this process is not safe to fork (threads, open devices); "" if it is."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"{threads} threads after the imports"
    paths = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            paths.append(os.readlink(link))
    devices = [path for path in paths if path.startswith(DEVICES)]
    return f"{devices[0]} open after the imports" if devices else ""


def main(argv: Sequence[str]) -> None:
    """Import the modules and fork ranks until the launcher is gone. Returns only in ranks, after their script."""
    # A separate process group, so that a terminal's Ctrl-C reaches only the launcher. Not a separate session: leading
    # a session is how the launcher recognizes ranks (stopper.py).
    with contextlib.suppress(PermissionError):  # it leads a session, and therefore a group
        os.setpgid(0, 0)
    die_with_parent()
    wire, launcher = socket.socket(fileno=int(argv[0])), int(argv[1])
    interrupts = signal.getsignal(signal.SIGINT)
    if interrupts is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for name in argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # otherwise a garbage collection in a rank copies the pages of all imported objects
    request, files = _serve(wire, launcher)
    wire.close()
    signal.signal(signal.SIGINT, interrupts)
    _become_rank(request["environ"], files)
    run(request["arguments"])


def _serve(wire: socket.socket, launcher: int) -> tuple[dict[str, Any], list[int]]:
    """Fork a rank for each request. Returns only in the ranks, with their request and its descriptors."""
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
    """Fork a child of the launcher that leads a session. Return its process number, and None in that process."""
    pid_reader, pid_writer = os.pipe()
    go_reader, go_writer = os.pipe()
    intermediate = os.fork()
    if not intermediate:
        if os.fork():
            os._exit(0)
        # Before sending the process number: the launcher forwards signals only to children that lead a session.
        os.setsid()
        os.write(pid_writer, str(os.getpid()).encode())
        for end in (pid_reader, pid_writer, go_writer):
            os.close(end)
        started = os.read(go_reader, 1)
        os.close(go_reader)
        if not started or os.getppid() != launcher:
            write_stderr(
                f"process {os.getpid()} exits: it should be a rank of process {launcher}, which is not its parent"
            )
            os._exit(1)
        return None
    os.close(pid_writer)
    os.close(go_reader)
    try:
        pid = int(os.read(pid_reader, 32))
        os.waitpid(intermediate, 0)  # from now on, the launcher is the rank's parent
        os.write(go_writer, b"!")
    finally:
        os.close(pid_reader)
        os.close(go_writer)
    return pid


def _become_rank(environ: Mapping[str, str], files: Sequence[int]) -> None:
    """Give this process its own output, environment and NumPy seed."""
    for descriptor, file in enumerate(files, 1):
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(environ)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def run(arguments: Sequence[str]) -> None:
    """Run ``python ARGUMENTS`` in this process, where these are [-u] SCRIPT FLAGS...

    This process was started without a script folder on sys.path (run_module.py), so the script's folder is added.
    """
    command = [*arguments[1:]] if arguments[0] == "-u" else [*arguments]
    sys.orig_argv = [sys.executable, *arguments]
    sys.argv = command
    if not getattr(sys.flags, "safe_path", False):  # new in Python 3.11
        sys.path.insert(0, os.path.dirname(os.path.realpath(command[0])))
    runpy.run_path(command[0], run_name="__main__")


def become(arguments: Sequence[str]) -> None:
    """Continue as ``python ARGUMENTS``: in this process if it was forked with the imports done, else by exec."""
    if all(name in sys.modules for name in MODULES):
        run(arguments)
        sys.exit(0)
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
