"""Learning rate and batch size over progress."""

import math

import pytest

from megapar.core.schedule import BatchSize, LearningRate


def test_warm_up_reaches_the_peak_with_its_last_step() -> None:
    rate = LearningRate(peak=1.0, floor=0.1, style="cosine", warmup_iters=4, decay_iters=12)
    assert [rate.at(i) for i in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert rate.at(4) == 1.0
    assert rate.at(8) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert rate.at(12) == rate.at(1000) == 0.1


def test_linear_and_constant() -> None:
    linear = LearningRate(peak=2.0, floor=0.0, style="linear", warmup_iters=0, decay_iters=4)
    assert [linear.at(i) for i in range(5)] == [2.0, 1.5, 1.0, 0.5, 0.0]
    constant = LearningRate(peak=2.0, floor=0.0, style="constant", warmup_iters=1, decay_iters=4)
    assert constant.at(100) == 2.0


def test_wsd_is_stable_then_linear() -> None:
    wsd = LearningRate(peak=1.0, floor=0.0, style="wsd", warmup_iters=2, decay_iters=10, wsd_decay_iters=4)
    assert {wsd.at(i) for i in range(2, 7)} == {1.0}
    assert [wsd.at(i) for i in range(6, 11)] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_batch_ramps_in_increments() -> None:
    batch = BatchSize(final=32, start=8, increment=8, ramp_samples=300)
    assert [batch.at(n) for n in (0, 99, 100, 199, 200, 299, 300, 10**9)] == [8, 8, 16, 16, 24, 24, 32, 32]
    assert BatchSize(16).at(0) == 16
