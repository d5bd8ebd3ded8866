"""Failures of ranks: which are named and repeat, and processes that no signal ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megapar.arguments import parse
from megapar.errors import DataError, DistributedError, TrainingError
from megapar.health.stop import failure
from megapar.launch_environment import failure_file
from megapar.tools.launcher import failures
from megapar.tools.launcher.failures import (
    Failure,
    PendingKills,
    describe_unkillable,
    end_ranks,
    failed_ranks,
    first_failure,
    is_refusal,
    next_action,
    repeated,
)

HERE = Failure("DataError", "source.py:7", 5, False, "32-39", 1.0)


def noted(folder: Path, error: BaseException, following: tuple[int, str] = (5, "32-39")) -> Failure | None:
    environ = {"TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
    try:
        raise error
    except BaseException as caught:
        failure.note(caught, environ, following)
        failure.note(RuntimeError("on the way out"), environ)
    return first_failure([failure_file(environ) or ""])


def test_what_a_rank_notes_is_what_the_launcher_reads(tmp_path: Path) -> None:
    found = noted(tmp_path, DataError("line 7"))
    assert found is not None
    assert (found.type, found.step, found.saved, found.samples) == ("DataError", 5, False, "32-39")
    assert found.where.startswith(f"{__file__}:")


@pytest.mark.parametrize(
    "error",
    [
        DistributedError("ranks [1] are silent"),
        ConnectionResetError(),
        OSError(5, "Input/output error"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        KeyboardInterrupt(),
        RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2"),
    ],
)
def test_what_another_rank_or_the_machine_has_caused_is_nobody_s_own(tmp_path: Path, error: BaseException) -> None:
    assert noted(tmp_path, error) is None


@pytest.mark.parametrize(
    ("error", "samples"),
    [(TrainingError("replicas"), ""), (TrainingError("nan", "8-15"), "8-15"), (ValueError("a bug"), "")],
)
def test_samples_are_stepped_over_only_where_they_may_be_the_cause(
    tmp_path: Path, error: BaseException, samples: str
) -> None:
    found = noted(tmp_path, error)
    assert found is not None
    assert found.samples == samples


def test_only_the_same_is_the_same() -> None:
    told = repeated(HERE, replace(HERE, at=9.0))
    assert told.startswith("DataError at step 5 again, at source.py:7, with no checkpoint in between; the job is not")
    assert "To skip the samples of that step, add --skip-samples 32-39 to the same command; if it has" in told
    twice = ["--skip-samples", "0-1", "--skip-samples", "4-5", "--data-path", "mock"]
    assert parse("moe", twice, {}).reliability.skip_samples == ("4-5",)
    assert "before the first step" in repeated(replace(HERE, step=0), replace(HERE, step=0, samples=""))
    for other in ({"type": "OSError"}, {"where": "source.py:8"}, {"step": 6}, {"saved": True}):
        assert repeated(HERE, replace(HERE, **other)) == ""
    assert repeated(None, HERE) == repeated(HERE, None) == ""


@pytest.mark.parametrize(
    ("statuses", "refused"),
    [*(([2, other], True) for other in (2, -15, 1)), ([-15, 2], True), ([1, 2], False), ([-9, 2], False), ([1], False)],
)
def test_ranks_are_refused_where_none_failed_before(statuses: list[int], refused: bool) -> None:
    failures = {rank: SimpleNamespace(exitcode=status, timestamp=rank) for rank, status in enumerate(statuses)}
    assert is_refusal(failures) is refused


def test_files_that_say_nothing_are_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("{")
    (tmp_path / "b").write_text('{"own": true, "type": "X"}')
    assert first_failure([str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "c"), ""]) is None


def lost_note(folder: Path, lost: bool) -> str:
    path = folder / f"{lost}.json"
    path.write_text(json.dumps({"lost": lost}))
    return str(path)


KILLED = [f"rank {rank} was killed (signal 9)" for rank in range(4)]
SIGBUS = ", SIGBUS: a file that it had mapped, such as the tokens of PREFIX.bin, was cut off, or /dev/shm is full"


@pytest.mark.parametrize(
    ("statuses", "lost", "then", "told"),
    [
        ({0: 1, 1: -9}, [0], "restarting, 1 of 2", "rank 1 was killed (signal 9); restarting, 1 of 2"),
        ({0: -15, 3: 1}, [], "", "rank 3 ended with status 1"),
        ({0: 1, 1: 1}, [0, 1], "", "ranks [0, 1] of this node lost ranks of other nodes, or were stopped from outside"),
        ({0: 2, 1: -15}, [], "", ""),
        ({0: -7}, [], "", f"rank 0 was killed (signal 7{SIGBUS})"),
        ({0: 2}, [], "restarting, 2 of 2", "rank 0 ended with status 2; restarting, 2 of 2"),
        (
            dict.fromkeys(range(6), -9),
            [],
            "",
            f"{', '.join(f'rank {n} was killed (signal 9)' for n in range(4))}, 2 more failed",
        ),
    ],
)
def test_who_failed(tmp_path: Path, statuses: dict[int, int], lost: list[int], then: str, told: str) -> None:
    notes = {rank: lost_note(tmp_path, rank in lost) if rank else None for rank in statuses}
    if 0 in lost:
        notes[0] = lost_note(tmp_path, True)
    assert failed_ranks(statuses, notes, then) == told


def test_what_comes_now() -> None:
    assert next_action(2, 2, job_ends=False) == "restarting, 1 of 2"
    assert next_action(2, 1, job_ends=False) == "restarting, 2 of 2"
    assert next_action(2, 0, job_ends=False) == "no restarts left of 2"
    assert next_action(2, 0, job_ends=True) == next_action(0, 0, job_ends=False) == ""


@dataclass
class Handler:
    """As torch has one of each rank."""

    proc: subprocess.Popen[bytes]

    def close(self, death_sig: signal.Signals) -> None:
        os.killpg(self.proc.pid, death_sig)


def handler(body: str, *arguments: str) -> Handler:
    return Handler(
        subprocess.Popen(
            [sys.executable, "-c", f"import os, signal, sys, threading, time\n{body}", *arguments],
            start_new_session=True,
            stdout=subprocess.PIPE,
        )
    )


def test_what_does_not_listen_is_killed() -> None:
    polite = handler("print('here', flush=True); time.sleep(100)")
    deaf = handler("signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(100)")
    for one in (polite, deaf):
        assert one.proc.stdout is not None
        assert one.proc.stdout.readline() == b"here\n"
    dying = PendingKills()
    assert dying.stuck({0: polite.proc.pid, 1: deaf.proc.pid}) == []
    assert end_ranks({0: polite, 1: deaf}, signal.SIGTERM, 0.5) == []
    assert [one.proc.returncode for one in (polite, deaf)] == [-signal.SIGTERM, -signal.SIGKILL]


@contextlib.contextmanager
def frozen(folder: Path) -> Iterator[Path]:
    image, disk = folder / "image", folder / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    steps = (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(disk)])
    try:
        for step in (*steps, ["fsfreeze", "-f", str(disk)]):
            if subprocess.run(step, capture_output=True).returncode:
                pytest.skip("no right to mount and freeze a disk here")
        yield disk
    finally:
        subprocess.run(["fsfreeze", "-u", str(disk)], capture_output=True)
        subprocess.run(["umount", "--lazy", str(disk)], capture_output=True)


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="needs a disk of its own")
def test_a_process_that_waits_for_a_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its main thread has ended the process, which a thread that writes keeps alive."""
    monkeypatch.setattr(failures, "KILL_SECONDS", 0.2)
    body = (
        "def write():\n"
        "    print('here', flush=True); open(sys.argv[1], 'w')\n"
        "threading.Thread(target=write).start()\n"
        "time.sleep(0.3); os._exit(1)"
    )
    with frozen(tmp_path) as disk:
        stuck = handler(body, str(disk / "file"))
        assert stuck.proc.stdout is not None
        assert stuck.proc.stdout.readline() == b"here\n"
        dying, found = PendingKills(), []
        for _ in range(200):
            found = found or dying.stuck({0: stuck.proc.pid})
            with contextlib.suppress(subprocess.TimeoutExpired):
                stuck.proc.wait(0.1 if not found else 0)
        assert found == [0]
        assert end_ranks({3: stuck}, signal.SIGTERM, 0.1) == [3]
        told = describe_unkillable(3, stuck.proc.pid)
    assert f"process {stuck.proc.pid} of rank 3 cannot be ended: no signal reaches it, in " in told
    assert stuck.proc.wait(60) == 1


def test_a_rank_that_the_launcher_killed_is_the_cause_only_of_what_no_rank_caused_itself(tmp_path: Path) -> None:
    notes = dict.fromkeys((0, 1, 3), lost_note(tmp_path, True)) | {2: None}
    hung = {0: 1, 1: 1, 2: 1, 3: -9}
    assert failed_ranks({0: 1, 1: 1, 2: -9}, notes, "", {2}) == "rank 2 did not respond, and was killed by the launcher"
    assert failed_ranks(hung, {**notes, 3: None}, "", {3}) == "rank 2 ended with status 1"
