"""The batches of an evaluation: every held-out sample counts once, and no rank runs another batch than the others."""

from __future__ import annotations

import itertools

import pytest

from megapar.training.step.evaluate import rounds


@pytest.mark.parametrize(
    ("samples", "size", "ranks"), itertools.product((1, 2, 3, 7, 8, 11, 12), (1, 2, 4), (1, 2, 3, 4))
)
def test_each_sample_counts_once_and_all_ranks_run_alike(samples: int, size: int, ranks: int) -> None:
    runs = [list(rounds(samples, size, rank, ranks)) for rank in range(ranks)]
    counted = [number for run in runs for numbers, counts in run if counts for number in numbers]
    assert sorted(counted) == list(range(samples))
    assert len({tuple(len(numbers) for numbers, _ in run) for run in runs}) == 1
