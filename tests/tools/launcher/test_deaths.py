"""A sentence for every way in which ranks fail; those that another one has drawn with it are not named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megapar.tools.launcher.deaths import describe, next_action


def noted(folder: Path, lost: bool) -> str:
    path = folder / f"{lost}.json"
    path.write_text(json.dumps({"lost": lost}))
    return str(path)


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
            ", ".join(f"rank {rank} was killed (signal 9)" for rank in range(4)) + ", 2 more failed",
        ),
    ],
)
def test_who_failed(tmp_path: Path, statuses: dict[int, int], lost: list[int], then: str, told: str) -> None:
    notes = {rank: noted(tmp_path, rank in lost) if rank else None for rank in statuses}
    if 0 in lost:
        notes[0] = noted(tmp_path, True)
    assert describe(statuses, notes, then) == told


def test_what_comes_now() -> None:
    assert next_action(2, 2, job_ends=False) == "restarting, 1 of 2"
    assert next_action(2, 1, job_ends=False) == "restarting, 2 of 2"
    assert next_action(2, 0, job_ends=False) == "no restarts left of 2"
    assert next_action(2, 0, job_ends=True) == next_action(0, 0, job_ends=False) == ""
