"""Small Python programs as processes, for tests of signals and deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 60
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)

# ``stick()`` never comes back from C code, whatever signals come: a mutex that is locked already. It says "stuck" when
# the kernel has the main thread waiting for it.
STICK = """
import ctypes, os, threading
def stick():
    mutex = ctypes.create_string_buffer(64)
    def look():
        while hex(ctypes.addressof(mutex)) not in open(f'/proc/self/task/{os.getpid()}/syscall').read(): pass
        print('stuck', flush=True)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    threading.Thread(target=look, daemon=True).start()
    lock(mutex)
"""


def start(
    program: str, ignored: Sequence[signal.Signals] = (), environ: dict[str, str] | None = None, **options: object
) -> subprocess.Popen[str]:
    """Start a program. Signals have their default effect there, unless ignored. Its output is in ``stdout``."""
    return subprocess.Popen(
        [*started(ignored), sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})},
        **options,  # type: ignore[call-overload]
    )


def started(ignored: Sequence[signal.Signals] = ()) -> list[str]:
    """Return a prefix of a command line that ignores only these signals, not those that this process ignores."""
    prefix = "import os, signal, sys\n"
    prefix += f"for n in {[int(n) for n in SIGNALS]}:\n"
    prefix += f"    signal.signal(n, signal.SIG_IGN if n in {[int(n) for n in ignored]} else signal.SIG_DFL)\n"
    return [sys.executable, "-Sc", prefix + "os.execvp(sys.argv[1], sys.argv[1:])"]


def read_until(process: subprocess.Popen[str], line: str) -> None:
    """Wait for a line of a process's output."""
    assert process.stdout is not None
    seen = []
    for said in process.stdout:
        seen.append(said)
        if said.strip() == line:
            return
    raise AssertionError(f"it never said {line!r}, but {''.join(seen)}")


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end of a process. Return its status and the output since the last read."""
    out, _ = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, out


def wait_for(path: Path, seconds: float = 120.0) -> None:
    """Wait until a file exists."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not appear within {seconds:g} s"
        time.sleep(0.02)


def wait_stopped(pid: int) -> None:
    """Wait until a process, which need not be a child, is stopped by a signal."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while _state(pid) != "T":
        assert time.monotonic() < deadline, f"process {pid} was not stopped"
        time.sleep(0.005)


def _state(pid: int) -> str:
    """Return the letter of a process's state: T if it is stopped."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        return stat.read_text().rpartition(")")[2].split()[0]
    return subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True).stdout[:1]
