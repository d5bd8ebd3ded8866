"""The launcher's side of the clean process that ranks are forked from (fresh.py), and torch's handler that uses it.

Starting a rank then costs a fork instead of an import of torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from io import TextIOWrapper
from typing import Any

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from megapar.health.stop.signal_listener import write_stderr
from megapar.tools.launcher.failures import ending
from megapar.tools.launcher.fresh import MODULES, ONE_THREAD, receive, send
from megapar.tools.launcher.rank_files import report_missing_logs
from megapar.tools.launcher.run_module import module_command

PATIENCE_SECONDS = 600.0  # for the imports, on a slow shared disk
_ANSWER_SECONDS = 30.0
_PR_SET_CHILD_SUBREAPER = 36
_MAX_POLL_SECONDS = 0.05


class Forked:
    """A forked rank, with the part of ``subprocess.Popen`` that torch's agent uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its status, negative for a signal; None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # other code has collected the status; subprocess also returns 0 then
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its status. Raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        deadline, pause = time.monotonic() + (timeout or 0.0), 0.0005
        while (status := self.poll()) is None:
            left = deadline - time.monotonic()
            if timeout is not None and left <= 0:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout)
            pause = min(2 * pause, _MAX_POLL_SECONDS)
            time.sleep(pause if timeout is None else min(pause, left))
        return status


class Warm:
    """The clean process, from its start to ``close``, which imports ``modules``.

    If it cannot be used, one message says why, and ``fork`` returns None: ranks are then started one by one.
    """

    def __init__(self, modules: Sequence[str] = MODULES) -> None:
        self._modules = modules
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: socket.socket | None = None
        self._is_ready = False
        if not _adopt_orphans(False):
            self._give_up("on this system only the init process can adopt orphans")
            return
        self._start()

    def _start(self) -> None:
        parent_end, child_end = socket.socketpair()
        parent_end.settimeout(PATIENCE_SECONDS)
        environ = {ONE_THREAD: "1", **os.environ}
        line = [sys.executable, "-u", *module_command("megapar.tools.launcher.fresh")]
        line += [str(child_end.fileno()), str(os.getpid()), *self._modules]
        with child_end:
            self._wire = parent_end
            self._process = subprocess.Popen(line, env=environ, pass_fds=[child_end.fileno()])
        self._is_ready = False

    def ready(self) -> bool:
        """Wait for the imports. Return True if ranks can be forked. Restarts the process if it has ended."""
        if self._process is not None and self._is_ready and self._process.poll() is not None:
            write_stderr(
                f"megapar launch: the process that forks ranks {ending(self._process.returncode)}; starting a new one"
            )
            self.close()
            self._start()
        if self._wire is None or self._is_ready:
            return self._is_ready
        try:
            answer, _ = receive(self._wire)
        except (OSError, EOFError, ValueError) as error:
            self._give_up(f"the process that forks ranks does not answer ({type(error).__name__})")
            return False
        self._wire.settimeout(_ANSWER_SECONDS)
        if answer["unclean"]:
            self._give_up(f"the process that forks ranks has {answer['unclean']}")
            return False
        self._is_ready = True
        return True

    def fork(self, arguments: Sequence[str], environ: Mapping[str, str], stdout: int, stderr: int) -> Forked | None:
        """Fork a rank that runs ``python ARGUMENTS``; return None if that is impossible.

        Call it within ``adopt_orphans``. ``stdout`` and ``stderr`` are open descriptors.
        """
        if self._wire is None or not self._is_ready:
            return None
        variables = {name: value for name, value in environ.items() if name != ONE_THREAD or name in os.environ}
        try:
            send(self._wire, {"arguments": [*arguments], "environ": variables}, (stdout, stderr))
            answer, _ = receive(self._wire)
            return Forked(int(answer["pid"]))
        except (OSError, EOFError, ValueError) as error:
            self._give_up(f"the process that forks ranks does not answer ({type(error).__name__})")
            return None

    def close(self) -> None:
        """End the process. Its ranks keep running."""
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
def adopt_orphans() -> Iterator[None]:
    """Make this process the parent of orphaned descendants, so that forked ranks become its children."""
    _adopt_orphans(True)
    try:
        yield
    finally:
        _adopt_orphans(False)


def _adopt_orphans(enabled: bool) -> bool:
    """Switch the adoption on or off. Return False if the system does not support it."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(enabled), 0, 0, 0) == 0)


class Handler(SubprocessHandler):
    """torch's handler of a rank's process. It forks the rank if possible, and both streams may share a log file."""

    def __init__(self, warm: Warm | None, stdout: str | None, stderr: str | None, **rest: Any) -> None:
        self._warm = warm
        self._paths = stdout, stderr
        super().__init__(stdout=None, stderr=None, **rest)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        try:
            self._stdout, self._stderr = (_opened(path) for path in self._paths)
        except OSError as error:  # RankLogs created the file, but its disk may have failed since
            report_missing_logs(env["RANK"], error)
            self._stdout = self._stderr = None
        files = [1 if self._stdout is None else self._stdout.fileno()]
        files += [2 if self._stderr is None else self._stderr.fileno()]
        if self._warm is not None:
            forked = self._warm.fork(args[1:], env, *files)
            if forked is not None:
                return forked
        process: subprocess.Popen[bytes] = super()._popen(args, env)
        return process


def _opened(path: str | None) -> TextIOWrapper | None:
    return open(path, "a", encoding="utf-8") if path else None


@contextlib.contextmanager
def starting_with(warm: Warm | None) -> Iterator[None]:
    """Make torch's agent start its ranks through ``Handler``. Its ``start_processes`` has no parameter for this."""

    def make(
        entrypoint: str,
        args: tuple[str, ...],
        env: Mapping[str, str],
        stdout: str | None,
        stderr: str | None,
        local_rank_id: int,
        numa_options: Any = None,
    ) -> Handler:
        return Handler(
            warm, stdout, stderr, entrypoint=entrypoint, args=args, env=env, local_rank_id=local_rank_id,
            numa_options=numa_options,
        )  # fmt: skip

    original = api.get_subprocess_handler
    api.get_subprocess_handler = make
    try:
        with adopt_orphans() if warm is not None else contextlib.nullcontext():
            yield
    finally:
        api.get_subprocess_handler = original
