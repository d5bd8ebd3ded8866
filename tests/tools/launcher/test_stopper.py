"""``megapar launch`` and signals, with real processes: what reaches it, its ranks, or all of them at once."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from megapar.health.stop.parent import started
from megapar.tools.launcher.stopper import Stopped, Stopper, Waiting, children
from tests.support.process import SIGNALS, Command, clean_environ, finish, read_until, wait_for
from tests.support.process import start as run

ROOT = Path(__file__).parents[3]
PATIENCE_SECONDS = 120
# Takes the signals of a rank that saves for as long as the test has not made the file "go".
RANK = """
import os, signal, sys, threading
from megapar.health.stop.control import StopSignal
rank, folder = os.environ['RANK'], sys.argv[1]
stop = StopSignal()
stop.install()
def leave(name):
    open(f'{folder}/{name}{rank}', 'w').write(str(stop.poll()))
leave('ready')
asked = threading.Event()
while not stop.poll(): asked.wait(0.01)
leave('asked')
while not os.path.exists(f'{folder}/go'): asked.wait(0.01)
leave('saved')
os._exit(0)
"""


def start(folder: Path, *options: str, ignored: Sequence[signal.Signals] = (), body: str = RANK) -> Command:
    script = folder / "job.py"
    script.write_text(body)
    line = ["launch", "--nproc-per-node", "2", *options, str(script), str(folder)]
    job = Command(line, folder, clean_environ(), ROOT, ignored)
    for rank in range(2):
        wait_for(folder / f"ready{rank}")
    return job


def saved(job: Command, folder: Path) -> None:
    """All ranks save and the job ends well."""
    for rank in range(2):
        wait_for(folder / f"asked{rank}")
    (folder / "go").touch()
    done = job.wait(PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.glob("saved*")} == {"saved0", "saved1"}
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", SIGNALS, ids=lambda n: n.name)
def test_each_signal_to_the_launcher_lets_the_ranks_save(tmp_path: Path, number: signal.Signals) -> None:
    job = start(tmp_path)
    job.send_signal(number)
    saved(job, tmp_path)


@pytest.mark.parametrize(
    ("number", "order"),
    [
        *((signal.SIGTERM, order) for order in ("launcher first", "ranks first", "between")),
        (signal.SIGINT, "between"),
    ],
)
def test_a_signal_to_the_whole_tree_lets_the_ranks_save(tmp_path: Path, number: signal.Signals, order: str) -> None:
    job = start(tmp_path)
    ranks = children(job.pid)
    assert len(ranks) == 2
    tree = {"launcher first": [job.pid, *ranks], "ranks first": [*ranks, job.pid], "between": [ranks[0], job.pid]}
    for pid in [*tree[order], *(ranks[1:] if order == "between" else [])]:
        os.kill(pid, number)
    saved(job, tmp_path)


def test_terms_that_follow_one_another_end_nothing(tmp_path: Path) -> None:
    job = start(tmp_path)
    job.send_signal(signal.SIGUSR1)
    wait_for(tmp_path / "asked0")
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        job.send_signal(number)
    saved(job, tmp_path)


def test_nohup_is_respected(tmp_path: Path) -> None:
    job = start(tmp_path, ignored=[signal.SIGHUP])
    for pid in (job.pid, *children(job.pid)):
        os.kill(pid, signal.SIGHUP)
    job.send_signal(signal.SIGUSR1)
    saved(job, tmp_path)
    assert {path.read_text() for path in tmp_path.glob("saved*")} == {str(int(signal.SIGTERM))}
    assert "SIGHUP" not in (tmp_path / "stderr").read_text()


IGNORING = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, {})
open(sys.argv[1] + '/ready' + os.environ['RANK'], 'w').close()
time.sleep(100)
"""


@pytest.mark.parametrize(
    ("handler", "options"),
    [("signal.SIG_IGN", ("--stop-timeout", "1")), ("lambda *_: os._exit(1)", ("--max-restarts", "3"))],
    ids=["ranks that do not stop", "a stop is no failure"],
)
def test_ranks_are_killed_after_the_time_out_and_are_not_started_again(
    tmp_path: Path, handler: str, options: tuple[str, ...]
) -> None:
    job = start(tmp_path, *options, body=IGNORING.format(handler))
    for rank in range(2):
        (tmp_path / f"ready{rank}").unlink()
    started = time.monotonic()
    job.send_signal(signal.SIGTERM)
    assert job.wait(PATIENCE_SECONDS).returncode == 1
    assert time.monotonic() - started < 60
    assert not list(tmp_path.glob("ready*"))


def test_who_insists_and_who_is_late_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    ended: list[int] = []
    monkeypatch.setattr("megapar.health.stop.signal_listener.AGAIN_SECONDS", 0.0)
    monkeypatch.setattr("megapar.tools.launcher.stopper._ranks", lambda: [1, 2])
    monkeypatch.setattr("megapar.tools.launcher.stopper.signal_children", sent.append)
    stopper = Stopper(300.0, ended.append)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        stopper._handle(number)
    assert sent == [signal.SIGTERM]
    stopper._handle(signal.SIGQUIT)
    assert sent == [signal.SIGTERM, signal.SIGKILL]
    for _ in range(3):  # the time after which nothing has become of that
        stopper._handle(0)
    assert (sent, ended) == ([signal.SIGTERM, *[signal.SIGKILL] * 3], [1])


def test_processes_of_others_are_passed_over_whatever_they_call_themselves() -> None:
    """PR_SET_NAME takes bytes that are no UTF-8: one such process on the machine kept a launcher from its ranks."""
    name = "import ctypes; ctypes.CDLL(None).prctl(15, b'\\xff\\xfe', 0, 0, 0)\n"
    process = run(f"{name}print('named', flush=True); input()", stdin=subprocess.PIPE)
    read_until(process, "named")
    assert process.pid in children(os.getpid())
    assert started(process.pid)
    finish(process)


def test_ranks_are_gone_when_the_launcher_is_killed(tmp_path: Path) -> None:
    body = f"from megapar.health.stop.parent import end_with_launcher\nend_with_launcher()\n{RANK}"
    job = start(tmp_path, body=body)
    ranks = children(job.pid)
    job.send_signal(signal.SIGKILL)
    job.wait(PATIENCE_SECONDS)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


@pytest.mark.parametrize(
    ("number", "nodes"),
    [(signal.SIGTERM, "2"), (signal.SIGINT, "1:2"), (signal.SIGUSR1, "2")],
    ids=["SIGTERM", "SIGINT", "SIGUSR1"],
)
def test_waiting_for_nodes_ends_at_once(tmp_path: Path, number: signal.Signals, nodes: str) -> None:
    """A second node that never comes; of 1:2 the last call is long."""
    script = tmp_path / "job.py"
    script.write_text("raise SystemExit('nobody starts this')")
    line = ["launch", "--nnodes", nodes, "--rdzv-endpoint", "localhost:0", "--rdzv-id", "job"]
    job = Command([*line, "--rdzv-conf", "last_call_timeout=600", str(script)], tmp_path, clean_environ(), ROOT)
    wait_for(tmp_path / "stderr")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while "nodes meet at" not in (tmp_path / "stderr").read_text():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)
    job.send_signal(number)
    started = time.monotonic()
    done = job.wait(PATIENCE_SECONDS)
    assert time.monotonic() - started < 10
    assert done.returncode == 1
    assert f"megapar launch: {number.name} while" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_launcher_that_is_stuck_without_ranks_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    stopper = Stopper(300.0, ended.append)
    monkeypatch.setattr("megapar.tools.launcher.stopper.children", lambda pid: [])
    with stopper.idle("waiting for nodes"):
        stopper._handle(signal.SIGTERM)
        assert stopper._due is not None
        stopper._handle(0)
    assert ended == [1]
    with pytest.raises(Stopped, match="SIGTERM while starting the ranks"), stopper.starting():
        pass


def test_who_waits_says_for_what(capsys: pytest.CaptureFixture[str]) -> None:
    said = threading.Event()
    asked: list[int] = []

    def what() -> str:
        asked.append(1)
        if len(asked) == 3:
            said.set()
        return f"nodes: {len(asked)} of 4 are present"

    with Waiting(what, 600.0, first_seconds=0.01, next_seconds=0.01):
        assert said.wait(PATIENCE_SECONDS)
    assert "megapar launch: waiting for nodes: 1 of 4 are present, 0 s of up to 600 s" in capsys.readouterr().err
