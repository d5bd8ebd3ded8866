"""The ``megapar`` command as a separate process, with its signals, status, output and environment.

It is forked from the server of tests.support.ranks, which has imported torch. The processes that it starts are not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.process import SIGNALS
from tests.support.ranks import forked

ROOT = Path(__file__).parents[2]
STREAMS = ("stdout", "stderr")


def clean_environ(**extra: str) -> dict[str, str]:
    """Return the environment of a launcher: this process's, with this package, and without a rank."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "PYTHONPATH": str(ROOT), **extra}


class Command:
    """A started ``megapar ARGV``.

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
