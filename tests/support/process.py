"""Small Python programs and the ``megapar`` command as processes, for tests of signals, deaths and launchers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.ranks import forked

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 60
STREAMS = ("stdout", "stderr")
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


def clean_environ(**extra: str) -> dict[str, str]:
    """Return the environment of a launcher: this process's, with this package, and without a rank."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "PYTHONPATH": str(ROOT), **extra}


class Command:
    """A started ``megapar ARGV``, with its signals, status, output and environment.

    It is forked from the server of tests.support.ranks, which has imported torch. The processes that it starts are not.

    Args:
        argv: Arguments of the command.
        folder: Folder of the files that take its standard output and error.
        environ: Its environment.
        cwd: Its working directory.
        ignored: Signals that it ignores, as by nohup. It does not inherit those that this process ignores.
    """

    def __init__(
        self,
        argv: Sequence[str],
        folder: Path,
        environ: Mapping[str, str],
        cwd: Path,
        ignored: Sequence[signal.Signals] = (),
    ) -> None:
        self._argv = list(argv)
        self._paths = [folder / name for name in STREAMS]
        self._process = forked().Process(
            target=_perform, args=(self._argv, dict(environ), cwd, self._paths, tuple(ignored)), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """Process number of the command."""
        assert self._process.pid
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the command."""
        os.kill(self.pid, number)

    def wait(self, seconds: float) -> subprocess.CompletedProcess[str]:
        """Wait for its end and return its status and output. Kills it and raises TimeoutExpired after ``seconds``."""
        self._process.join(seconds)
        status = self._process.exitcode
        if status is None:
            self._process.kill()
            self._process.join()
        out, err = (path.read_text(encoding="utf-8") for path in self._paths)
        if status is None:
            raise subprocess.TimeoutExpired(self._argv, seconds, out, err)
        return subprocess.CompletedProcess(self._argv, status, out, err)


def _perform(
    argv: list[str], environ: dict[str, str], cwd: Path, paths: list[Path], ignored: tuple[signal.Signals, ...]
) -> None:
    for each in {*SIGNALS, *ignored}:
        signal.signal(each, signal.SIG_IGN if each in ignored else signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as Python starts
    for number, path in enumerate(paths, 1):
        with path.open("wb") as stream:
            os.dup2(stream.fileno(), number)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    sys.argv = ["megapar", *argv]
    from megapar.tools.main import main

    sys.exit(main(argv))
