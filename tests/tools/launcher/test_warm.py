"""Ranks that are forked are as those that are started: children with a session, status, output and script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megapar.tools.launcher.failures import ending
from megapar.tools.launcher.warm import Handler, Warm, adopt_orphans

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="orphans go to the launcher on Linux only")
PATIENCE_SECONDS = 60.0
BODY = (
    "import json, os, signal, sys\n"
    "assert __name__ == '__main__'\n"
    "print(sys.argv[1:], os.environ['MINE'], os.getsid(0) == os.getpid(), os.getppid(), 'json' in sys.modules)\n"
    "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, file=sys.stderr)\n"
    "import beside\n"
    "exec(sys.argv[1])\n"
)


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    made = Warm(("json",))
    try:
        assert made.ready()
        yield made
    finally:
        made.close()


def run(warm: Warm, folder: Path, what: str) -> tuple[int, str]:
    script, said = folder / "job.py", folder / "said"
    script.write_text(BODY)
    (folder / "beside.py").write_text("")
    with said.open("a") as file, adopt_orphans():
        forked = warm.fork(
            ["-u", str(script), what], {**os.environ, "MINE": "5"}, file.fileno(), file.fileno()
        )  # fmt: skip
    assert forked is not None
    return forked.wait(PATIENCE_SECONDS), said.read_text()


@pytest.mark.parametrize(
    ("what", "status"),
    [("pass", 0), ("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", -signal.SIGKILL), ("1 / 0", 1)],
)
def test_what_a_forked_rank_finds_and_how_it_ends(warm: Warm, tmp_path: Path, what: str, status: int) -> None:
    ended, said = run(warm, tmp_path, what)
    assert ended == status, said
    # A shell that starts a job in the background has it ignore interrupts, and so do all its children.
    interruptible = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    assert said.startswith(f"{[what]} 5 True {os.getpid()} True\n{interruptible}\n")
    assert ("ZeroDivisionError" in said) == (what == "1 / 0")


def test_a_script_finds_modules_where_it_finds_them_without_a_fork(warm: Warm, tmp_path: Path) -> None:
    script, said = tmp_path / "job.py", tmp_path / "said"
    script.write_text("import sys; print(sys.path)")
    with said.open("w") as file, adopt_orphans():
        forked = warm.fork(["-u", str(script)], os.environ, file.fileno(), file.fileno())
    assert forked is not None
    assert forked.wait(PATIENCE_SECONDS) == 0
    alone = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert said.read_text() == alone.stdout


def test_a_wait_for_a_rank_ends_in_time(warm: Warm, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("while True: pass")
    with adopt_orphans():
        forked = warm.fork([str(tmp_path / "job.py")], os.environ, 1, 2)
    assert forked is not None
    with pytest.raises(subprocess.TimeoutExpired):
        forked.wait(0.01)
    assert forked.poll() is None
    os.kill(forked.pid, signal.SIGTERM)
    assert forked.wait(PATIENCE_SECONDS) == forked.poll() == -signal.SIGTERM


def test_after_its_death_there_is_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warm = Warm(())
    try:
        assert warm.ready()
        assert warm._process is not None
        warm._process.kill()
        warm._process.wait()
        assert warm.ready()
        assert "was killed (signal 9); starting a new one" in capsys.readouterr().err
        (tmp_path / "job.py").touch()
        with adopt_orphans():
            forked = warm.fork([str(tmp_path / "job.py")], os.environ, 1, 2)
        assert forked is not None
        assert forked.wait(PATIENCE_SECONDS) == 0
    finally:
        warm.close()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "2 threads"),
        ("import os; os._exit(1)", "does not answer (EOFError)"),
    ],
)
def test_without_a_clean_process_ranks_are_started_one_by_one(
    body: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "spoils.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    warm = Warm(("spoils",))
    assert not warm.ready()
    assert warm.fork(["job.py"], os.environ, 1, 2) is None
    said = capsys.readouterr().err
    assert told in said
    assert "ranks are started one by one" in said


def test_how_a_process_ended() -> None:
    assert ending(-9) == "was killed (signal 9)"
    assert ending(2) == "ended with status 2"


def test_a_rank_whose_log_file_is_gone_writes_where_the_launcher_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = str(tmp_path / "gone" / "rank-3.log")
    made = Handler(
        None, log, log, entrypoint=sys.executable, args=("-c", "print('here')"), env={"RANK": "3"}, local_rank_id=0,
        numa_options=None,
    )  # fmt: skip
    assert made.proc.wait(60) == 0
    said = capfd.readouterr()
    assert said.out == "here\n"
    assert said.err.startswith("megapar launch: no log file for ranks 3: ")
    assert said.err.count("\n") == 1
