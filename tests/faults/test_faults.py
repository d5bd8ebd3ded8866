"""Real processes and a real fault; scripts/fault_matrix.sh has all of them."""

from __future__ import annotations

from pathlib import Path

from tests.faults.job import FP64, Fault, run_job
from tests.support.training import run

LAYOUT = ("--sharding-degree", "2")


def test_a_rank_that_is_killed_in_a_save_costs_no_more_than_the_interval(tmp_path: Path) -> None:
    fault = Fault("kill after rename", rank=0, iteration=4)
    ended = run_job(tmp_path, 2, fault, *LAYOUT, "--no-async-save", restarts=1)
    assert ended.status == 0, ended.output
    assert ended.losses == {record.iteration: record.loss for record in run(2, "moe", *FP64, *LAYOUT).records}
    assert len(ended.strikes) == 1
    assert ended.lost_steps
    assert max(ended.lost_steps) <= 2
