"""Ranks end with their launcher: killed by the kernel, or by a thread that looks; where it went before they asked."""

from __future__ import annotations

import signal
import sys

import pytest

from tests.support.process import STICK, finish, read_until, start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal, and /proc")

CHILD = f"""
import os, sys, threading
from megapar.health.stop import parent
{STICK}
BEFORE
parent.end_with_launcher()
print('ready', flush=True)
stick()
"""

# What it starts keeps its output: the test reads to the end when all of them are gone.
LAUNCHER = """
import os, subprocess, sys, threading
from megapar.health.stop.parent import be_launcher
be_launcher(os.environ, os.environ['TORCHELASTIC_RUN_ID'])
go, gone = os.pipe()
line = [sys.executable, '-c', {child!r}]
subprocess.Popen({wrapped} + line, start_new_session=True, pass_fds=[go], env=dict(os.environ, GO=str(go)))
{then}
"""
WAIT = "threading.Event().wait()"
RANK = {"TORCHELASTIC_RUN_ID": "job"}


def killed(before: str = "", wrapped: tuple[str, ...] = (), **environ: str) -> str:
    """What a rank whose launcher is killed says from then on; a time-out where it lives on."""
    child = CHILD.replace("BEFORE", before)
    launcher = start(LAUNCHER.format(child=child, wrapped=list(wrapped), then=WAIT), environ={**RANK, **environ})
    read_until(launcher, "stuck")
    launcher.send_signal(signal.SIGKILL)
    return finish(launcher)[1]


def test_the_kernel_kills_a_rank_that_is_stuck() -> None:
    assert killed() == ""


def test_a_thread_looks_where_the_kernel_does_not_tell() -> None:
    assert "on which it depends, has ended" in killed("parent.die_with_parent = lambda: None")


def test_a_process_between_launcher_and_rank_does_not_keep_it_alive() -> None:
    assert "on which it depends, has ended" in killed(wrapped=("sh", "-c", '"$@"; exit 1', "sh"))


def test_ranks_of_torchrun_end_with_their_agent() -> None:
    assert killed("del os.environ[parent.LAUNCHER]") == ""


@pytest.mark.parametrize(("job", "said"), [("job", "megapar launch, process"), ("another", "ready")])
def test_a_launcher_that_went_before_the_rank_asked(job: str, said: str) -> None:
    """The rank waits for its end; with another job's name in its environment, the launcher is none of its own."""
    before = f"os.environ['TORCHELASTIC_RUN_ID'] = {job!r}; os.read(int(os.environ['GO']), 1)"
    child = CHILD.replace("BEFORE", before).replace("stick()\n", "os._exit(0)\n")
    then = "os.close(go); os._exit(0)"  # the writing end closes with the process
    _, out = finish(start(LAUNCHER.format(child=child, wrapped=[], then=then), environ=RANK))
    assert said in out
    assert ("ready" in out) is (job != "job")


def test_other_processes_may_outlive_their_parents() -> None:
    before = "del os.environ['TORCHELASTIC_RUN_ID'], os.environ[parent.LAUNCHER]; parent._POLL_SECONDS = 0.01"
    after = "os.read(int(os.environ['GO']), 1); threading.Event().wait(0.2); print('lives'); sys.stdout.flush()"
    child = CHILD.replace("BEFORE", before).replace("stick()\n", f"{after}\n")
    launcher = start(LAUNCHER.format(child=child, wrapped=[], then=WAIT), environ=RANK)
    read_until(launcher, "ready")
    launcher.send_signal(signal.SIGKILL)
    assert finish(launcher)[1] == "lives\n"
