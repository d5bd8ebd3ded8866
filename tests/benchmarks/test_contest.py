"""The statistics by which contestants are compared."""

from __future__ import annotations

import random

import pytest

from benchmarks.support.contest import paired, paired_interval


def rounds(*seconds: float) -> list[dict[str, float]]:
    return [{"seconds": value} for value in seconds]


def test_a_pair_is_compared_within_its_round():
    assert paired(rounds(2.0, 20.0, 3.0), rounds(1.0, 10.0, 2.0)) == 2.0


def test_the_interval_leaves_out_as_many_as_chance_allows():
    # Of 41 pairs at most 13 lie on one side of the median in 1.4 % of all draws (binomial), 14 in 3.0 %.
    ratios = [1.0 + number / 100 for number in range(41)]
    random.Random(1).shuffle(ratios)
    low, high = paired_interval(rounds(*ratios), rounds(*[1.0] * 41))
    assert (low, high) == pytest.approx((1.13, 1.27))


def test_too_few_rounds_bound_nothing():
    with pytest.raises(ValueError, match="5 rounds cannot bound a median with 95% confidence"):
        paired_interval(rounds(1, 2, 3, 4, 5), rounds(1, 1, 1, 1, 1))
    assert paired_interval(rounds(1, 2, 3, 4, 5, 6), rounds(1, 1, 1, 1, 1, 1)) == (1.0, 6.0)
