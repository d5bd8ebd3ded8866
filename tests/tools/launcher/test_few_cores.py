"""When the launcher warns of too few cores, and what it advises."""

from __future__ import annotations

import pytest

from megapar.tools.launcher.few_cores import few_cores


@pytest.mark.parametrize(
    ("ranks", "usable", "present", "warns"),
    [
        (8, 1, 96, True),  # srun without --cpus-per-task
        (8, 7, 96, True),
        (8, 8, 96, False),
        (4, 2, 2, False),  # a laptop: no scheduler keeps cores from it
        (4, 1, 2, True),
        (1, 1, 96, False),
    ],
)
def test_ranks_that_share_cores_although_there_are_more(ranks: int, usable: int, present: int, warns: bool) -> None:
    assert bool(list(few_cores(ranks, usable, present, {}))) == warns


@pytest.mark.parametrize(
    ("environ", "advice"),
    [
        ({"SLURM_JOB_ID": "7"}, "SRUN_CPUS_PER_TASK=N"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "limits.cpu"),
        ({}, "taskset"),
    ],
)
def test_the_advice_is_for_the_scheduler(environ: dict[str, str], advice: str) -> None:
    (line,) = few_cores(8, 1, 96, environ)
    assert line.startswith("warning: 8 ranks share 1 of this machine's 96 cores")
    assert advice in line
