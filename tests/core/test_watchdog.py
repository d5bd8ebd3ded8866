"""The watchdog: who is late, in which collective and line, and that a step which hangs ends the run."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megapar.core.axis import Axis
from megapar.core.journal import Journal
from megapar.core.watchdog import Watchdog, explain, late_ranks
from megapar.training.stragglers import Pace, Stragglers, summary
from tests.support.ranks import run_ranks

AXES = {"mp": {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}, "data": {0: [0, 2], 2: [0, 2], 1: [1, 3], 3: [1, 3]}}


def report(rank: int, mp: int, data: int) -> dict[str, Any]:
    return {
        "iteration": 7,
        "in_step": True,
        "seconds": 31.0,
        "counts": {"mp": mp, "data": data},
        "axes": {name: ranks[rank] for name, ranks in AXES.items()},
        "last": f"all_reduce {mp} on mp, launched 30.0 s ago",
        "recent": [f"all_reduce {mp} on mp"],
        "line": f"model.py:{mp} in forward: x = y",
    }


def test_the_late_rank_is_the_one_that_waits_for_nobody() -> None:
    # Rank 3 stands in front of its 10th mp collective; 2 waits for it there, 0 for 2 on data, 1 for 0.
    reports = {0: report(0, 12, 5), 1: report(1, 13, 4), 2: report(2, 10, 4), 3: report(3, 9, 4)}
    assert late_ranks(reports, 4) == [3]
    told = explain(reports, 4, 30.0)
    assert "step 7 has taken 31.0 s" in told
    assert "late: rank 3 in step 7, at model.py:9 in forward: x = y; last collective: all_reduce 9 on mp" in told
    assert "waiting: ranks 0 " in told


def test_a_rank_that_does_not_answer_is_late_before_all_others() -> None:
    reports = {rank: report(rank, 12, 5) for rank in (0, 1, 3)}
    assert late_ranks(reports, 4) == [2]
    assert "rank 2 does not answer: stopped, dead, or off the network" in explain(reports, 4, 30.0)


def test_where_nobody_is_behind_the_network_is_suspected() -> None:
    reports = {rank: report(rank, 12, 5) for rank in range(4)}
    assert late_ranks(reports, 4) == []
    assert "no rank is behind" in explain(reports, 4, 30.0)


def test_a_long_step_of_one_process_ends_it_and_names_the_line() -> None:
    told: list[str] = []
    ended = threading.Event()
    statuses: list[int] = []
    journal = Journal()
    journal.note("mp", "all_reduce")

    def end(status: int) -> None:
        statuses.append(status)
        ended.set()

    watchdog = Watchdog(0.3, 0, 1, None, journal, {}, tell=told.append, end=end)
    watchdog.start()
    watchdog.before_step(3)
    assert ended.wait(30)  # the line that hangs
    watchdog.close()
    assert statuses == [1]
    assert "step 3 has taken" in told[0]
    assert "assert ended.wait(30)  # the line that hangs" in told[0]
    assert "all_reduce 1 on mp" in told[0]


def test_steps_in_time_and_what_is_between_them_are_left_alone() -> None:
    ended: list[int] = []
    watchdog = Watchdog(0.2, 0, 1, None, Journal(), {}, tell=lambda text: None, end=ended.append)
    watchdog.start()
    for step in range(8):
        watchdog.before_step(step)
        time.monotonic()
        watchdog.after_step(step)
        threading.Event().wait(0.05)
    watchdog.close()
    assert ended == []


def hang(rank: int, world_size: int, rendezvous: str, records: Path) -> tuple[list[str], bool]:
    """Rank 1 never comes to the second collective; what the watchdog says on each rank."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "20"
    store = dist.FileStore(f"{rendezvous}-watchdog", world_size)
    axis = Axis("data", world_size, rank, None, tuple(range(world_size)))
    told: list[str] = []
    ended = threading.Event()
    watchdog = Watchdog(
        *(0.5, rank, world_size, dist.PrefixStore("watchdog", store), axis.ledger.journal, {"data": axis.ranks}),
        records=records,
        tell=told.append,
        end=lambda status: ended.set(),
    )
    watchdog.start()
    watchdog.before_step(1)
    axis.note("all_reduce")
    if rank != 1:
        axis.note("all_gather")
    ended.wait(30)
    watchdog.close()
    return told, ended.is_set()


def test_ranks_tell_each_other_where_they_are_through_the_store(tmp_path: Path) -> None:
    results = run_ranks(3, hang, tmp_path, group=False)
    assert all(ended for _, ended in results)
    (told, *_), (late, *_) = results[0][0], results[1][0]
    assert "late: rank 1 in step 1" in told
    assert "ended.wait(30)" in told
    assert "waiting: ranks 0, 2 " in told.replace(" ...", "") or "all_gather 2 on data" in told
    assert late.startswith("rank 1: ended by the watchdog")


def test_the_slowest_rank_is_named_against_the_median() -> None:
    pace = summary([1.0, 1.1, 0.9, 2.5])
    assert pace == Pace(p50=1.0, p90=2.5, max=2.5, slowest_rank=3)
    stragglers = Stragglers(1.5)
    said = [stragglers.hear(pace, 4) for _ in range(4)]
    assert said[:2] == ["", ""]
    assert "rank 3 is slow: 2.500 s of own work in a step, 1.000 s in the median rank" in said[2]
    assert said[3] == ""  # once
    for factor in (3.0, 0.0):
        assert not pace.stands_out(factor)


def test_one_busy_moment_makes_no_slow_rank() -> None:
    stragglers = Stragglers(1.5)
    slow, other, even = summary([1.0, 2.0]), summary([2.0, 1.0]), summary([1.0, 1.01])
    assert [stragglers.hear(pace, 10) for pace in (slow, slow, other, other, even, slow, slow)] == [""] * 7
    assert "rank 1 is slow" in stragglers.hear(slow, 10)
    assert [Stragglers(1.5).hear(slow, 1) for _ in range(9)] == [""] * 9  # few steps
