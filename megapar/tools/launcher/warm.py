"""The launcher's end of the clean process from which ranks are forked (fresh.py): the start of a rank costs a
fork then, and not the import of torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megapar.core.health.signal_listener import write_stderr
from megapar.schema.flag import SCRIPTS
from megapar.tools.launcher import own
from megapar.tools.launcher.fresh import MODULES, ONE_THREAD, receive, send

PATIENCE_SECONDS = 600.0  # for the imports, on a slow shared disk
_ANSWER_SECONDS = 30.0
_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_LOOK_SECONDS = 0.05


class Forked:
    """A rank that was forked, with what torch's agent uses of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its status, negative for a signal; None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # as subprocess does where somebody else has asked
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its status. Raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        deadline, pause = time.monotonic() + (timeout or 0.0), 0.0005
        while (status := self.poll()) is None:
            left = deadline - time.monotonic()
            if timeout is not None and left <= 0:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout)
            pause = min(2 * pause, _LONGEST_LOOK_SECONDS)
            time.sleep(pause if timeout is None else min(pause, left))
        return status


class Warm:
    """The clean process, from its start to ``close``. Where it cannot be had that is said once, and ``fork`` gives
    None: ranks are started one by one then. modules: that it imports.
    """

    def __init__(self, modules: Sequence[str] = MODULES) -> None:
        self._modules = modules
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: socket.socket | None = None
        self._is_ready = False
        if not _take_orphans(False):
            self._give_up("this system gives orphans to nobody but its first process")
            return
        self._start()

    def _start(self) -> None:
        mine, its = socket.socketpair()
        mine.settimeout(PATIENCE_SECONDS)
        # Python's own warnings of forks from threads do not concern it: it has none.
        environ = {ONE_THREAD: "1", **os.environ}
        line = [sys.executable, "-u", *own.line("megapar.tools.launcher.fresh")]
        line += [str(its.fileno()), str(os.getpid()), *self._modules]
        with its:
            self._wire = mine
            self._process = subprocess.Popen(line, env=environ, pass_fds=[its.fileno()])
        self._is_ready = False

    def ready(self) -> bool:
        """Wait for the imports; whether ranks can be forked. After its death there is another one."""
        if self._process is not None and self._is_ready and self._process.poll() is not None:
            write_stderr(
                f"megapar launch: the process that forks ranks {ending(self._process.returncode)}; here is another"
            )
            self.close()
            self._start()
        if self._wire is None or self._is_ready:
            return self._is_ready
        try:
            told, _ = receive(self._wire)
        except (OSError, EOFError, ValueError) as error:
            self._give_up(f"the process that was to fork them does not answer ({type(error).__name__})")
            return False
        self._wire.settimeout(_ANSWER_SECONDS)
        if told["unclean"]:
            self._give_up(f"the process that was to fork them has {told['unclean']}")
            return False
        self._is_ready = True
        return True

    def fork(self, arguments: Sequence[str], environ: Mapping[str, str], stdout: int, stderr: int) -> Forked | None:
        """Start ``python ARGUMENTS`` with these files; None where that is not possible. Within ``orphans_come``."""
        if self._wire is None or not self._is_ready:
            return None
        kept = {name: value for name, value in environ.items() if name != ONE_THREAD or name in os.environ}
        try:
            send(self._wire, {"arguments": [*arguments], "environ": kept}, (stdout, stderr))
            told, _ = receive(self._wire)
            return Forked(int(told["pid"]))
        except (OSError, EOFError, ValueError) as error:
            self._give_up(f"the process that was to fork them does not answer ({type(error).__name__})")
            return None

    def close(self) -> None:
        """End it; ranks go on."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._is_ready = False

    def _give_up(self, why: str) -> None:
        write_stderr(f"megapar launch: {why}; ranks are started one by one, which takes longer")
        self.close()


@contextlib.contextmanager
def orphans_come() -> Iterator[None]:
    """While ranks are forked: they are children of this process, as those are that it starts itself."""
    _take_orphans(True)
    try:
        yield
    finally:
        _take_orphans(False)


def _take_orphans(yes: bool) -> bool:
    """Whether this system knows that."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(yes), 0, 0, 0) == 0)


def wanted(asked: bool | None, script: str) -> bool:
    """Whether to start ranks from a warm process. asked: by --warm-start; None: for megapar's own scripts, where torch
    can be imported without starting a device.

    A script of somebody's own may set variables before it imports torch, which would be too late.
    """
    if asked is not None:
        return asked
    own = Path(script).name in SCRIPTS.values()
    # torch imports torch_npu by itself where it is installed, and that starts the device.
    return own and sys.platform == "linux" and importlib.util.find_spec("torch_npu") is None


def ending(status: int) -> str:
    """was killed (signal 9), or ended with status 1."""
    return f"was killed (signal {-status})" if status < 0 else f"ended with status {status}"
