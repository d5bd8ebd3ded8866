"""Real processes and real faults: one in the suite, some by ``-m table``; scripts/fault_matrix.sh has all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.job import FP64, Ended, Fault, run_job, run_nodes
from tests.faults.outcome import uninterrupted
from tests.support.training import run

LAYOUT = ("--sharding-degree", "2")


@pytest.fixture(scope="module")
def want() -> dict[int, float]:
    return {record.iteration: record.loss for record in run(2, "moe", *FP64, *LAYOUT).records}


def check(ended: Ended, want: dict[int, float], most_lost: int) -> None:
    assert ended.status == 0, ended.output
    assert ended.losses == want
    assert len(ended.strikes) == 1
    assert ended.lost_steps
    assert max(ended.lost_steps) <= most_lost


def test_a_rank_that_is_killed_in_a_save_costs_no_more_than_the_interval(
    tmp_path: Path, want: dict[int, float]
) -> None:
    fault = Fault("kill after rename", rank=0, iteration=4)
    check(run_job(tmp_path, 2, fault, *LAYOUT, "--no-async-save", restarts=1), want, 2)


@pytest.mark.table
def test_a_rank_that_stands_still_is_named_and_replaced(tmp_path: Path, want: dict[int, float]) -> None:
    fault = Fault("SIGSTOP", rank=1, iteration=4)
    ended = run_job(tmp_path, 2, fault, *LAYOUT, "--step-timeout-seconds", "4", restarts=1)
    check(ended, want, 3)
    assert "late: rank 1 does not answer" in ended.output
    assert "step 4 has taken" in ended.output


@pytest.mark.table
def test_a_signal_saves_and_the_next_start_goes_on(tmp_path: Path, want: dict[int, float]) -> None:
    ended = run_job(tmp_path, 2, Fault("SIGTERM", rank=1, iteration=3), *LAYOUT)
    assert ended.status == 0, ended.output
    assert "stopped at iteration 3: asked to stop by a signal; saved" in ended.output
    assert "to continue, run the same command again" in ended.output  # it has --load too
    assert ended.losses == {step: want[step] for step in (1, 2, 3)}
    assert run_job(tmp_path, 2, Fault("none", attempts=()), *LAYOUT).losses == want


@pytest.mark.table
@pytest.mark.parametrize("another", [False, True])
def test_a_node_that_is_lost_is_done_without_or_replaced(tmp_path: Path, another: bool) -> None:
    flags = ("--mp-degree", "2", "--sharding-degree", "-1")
    whole = uninterrupted(4, *flags)
    ended = run_nodes(tmp_path, 2, 4, *flags, another=another)
    assert ended.status == 0, ended.output
    assert ended.losses == pytest.approx(whole, rel=1e-10)
    assert max(ended.lost_steps) <= 2
    assert "on 1 nodes: 2 of 4 ranks are present: sharding 2 -> 1; the global batch is unchanged" in ended.output
    assert ("launch: 2 of 4 ranks are present: sharding 2 -> 1" in ended.output) is not another
