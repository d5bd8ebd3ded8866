"""A process is recognized by more than its number."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megapar.health.stop.process import Process, cores


def test_this_process_lives() -> None:
    here = Process.here()
    assert here.pid == os.getpid()
    assert here.lives() is True
    assert Process.from_json(here.to_json()) == here


def test_a_process_is_gone_when_it_has_ended_or_its_number_is_another_ones() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = Process.of(child.pid)
    assert process.lives() is True
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.lives() is False  # it has ended, and nobody has asked how
    child.communicate()
    assert process.lives() is False
    assert replace(Process.here(), started=1).lives() is False


@pytest.mark.parametrize("other", [{"boot": "b"}, {"host": "h"}, {"namespace": 7}, {"boot": ""}])
def test_what_runs_elsewhere_cannot_be_seen(other: dict[str, object]) -> None:
    assert replace(Process.here(), **other).lives() is None  # type: ignore[arg-type]
    assert replace(Process.here(), pid=2**31 - 1, **other).lives() is None  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"pid": "7"}, {"pid": True}, {"host": 3}, {"boot": "b" * 301}, {"started": 1.0}])
def test_what_a_file_says_is_a_process_or_an_error(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="is "):
        Process.from_json(Process.here().to_json() | wrong)
    with pytest.raises(KeyError):
        Process.from_json({})


@pytest.mark.parametrize(
    ("limits", "found"),
    [
        ({"pod/run": "100000 100000"}, 1),
        ({"pod/run": "50000 100000"}, 1),  # half a core
        ({"pod/run": "max 100000", "pod": "100000 100000"}, 1),  # the limit of a group around it
        ({".": "100000 100000"}, 1),
        ({"pod/run": "max 100000"}, None),
        ({"pod/run": "99900000 100000"}, None),
        ({}, None),
    ],
)
def test_cores_of_a_container_with_a_limit(tmp_path: Path, limits: dict[str, str], found: int | None) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("1:cpu:/other\n0::/pod/run\n")
    for group, text in limits.items():
        (tmp_path / "groups" / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / group / "cpu.max").write_text(f"{text}\n")
    allowed = len(os.sched_getaffinity(0))
    assert cores(tmp_path, tmp_path / "groups") == (found or allowed)
