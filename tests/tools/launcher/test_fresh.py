"""The process of which ranks are forks ends with its launcher, and imports everything without a thread or a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megapar.tools.launcher.fresh import MODULES, ONE_THREAD
from megapar.tools.launcher.warm import Warm
from tests.support.process import finish, start

PATIENCE_SECONDS = 120.0
LAUNCHER = """
from megapar.tools.launcher.warm import Warm
w = Warm(())
w.ready()
print(w._process.pid, flush=True)
input()
"""
FORK = """
import os, signal
from megapar.health.stop.parent import die_with_parent
from megapar.tools.launcher.fresh import _fork
from megapar.tools.launcher.stopper import _ranks
from megapar.tools.launcher.warm import Forked, adopt_orphans
with adopt_orphans():
    rank = _fork(os.getpid())
    if rank is None:  # and does nothing more
        die_with_parent()
        signal.pause()
print(list(_ranks()) == [rank])
os.killpg(rank, signal.SIGKILL)
print(Forked(rank).wait(60.0))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("end", ["kill", "input"])
def test_it_ends_with_the_launcher(end: str) -> None:
    line = [sys.executable, "-c", LAUNCHER]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdin is not None
        pid = int(launcher.stdout.readline())
        assert "megapar.tools.launcher.fresh" in Path(f"/proc/{pid}/cmdline").read_text()
        gone = os.pidfd_open(pid)
        if end == "kill":
            launcher.kill()
        else:
            launcher.stdin.close()
        launcher.wait(PATIENCE_SECONDS)
    import select

    poll = select.poll()
    poll.register(gone, select.POLLIN)
    assert poll.poll(PATIENCE_SECONDS * 1000)
    os.close(gone)


def test_what_ranks_need_starts_no_thread_and_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.delenv(ONE_THREAD, raising=False)
    warm = Warm(MODULES)
    try:
        assert warm.ready()
    finally:
        warm.close()


@pytest.mark.skipif(sys.platform != "linux", reason="orphans go to the launcher on Linux only")
def test_a_rank_can_be_told_to_stop_from_the_moment_its_number_is_known() -> None:
    """Signals go to leaders of sessions: one that was none yet was passed over, and is told only once."""
    assert finish(start(FORK)) == (0, "True\n-9\n")
