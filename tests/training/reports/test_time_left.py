"""The time left: of measured steps, evaluations and saves, never of the first step."""

from __future__ import annotations

import pytest

from megapar.training.reports.time_left import STEPS, TimeLeft


class Run:
    """A run by a clock that the test moves."""

    def __init__(self, train_iters: int, iteration: int = 0, **intervals: int) -> None:
        self.now, self.iteration = 0.0, iteration
        self.left = TimeLeft(train_iters, intervals, iteration, lambda: self.now)

    def steps(self, count: int, seconds: float) -> float | None:
        for _ in range(count):
            self.now, self.iteration = self.now + seconds, self.iteration + 1
            self.left.stepped(self.iteration)
        return self.left.seconds()

    def pause(self, name: str, seconds: float) -> float | None:
        self.now += seconds
        self.left.paused(name, seconds)
        return self.left.seconds()


def test_the_first_step_does_not_count() -> None:
    run = Run(100)
    assert run.steps(1, 60.0) is None
    assert str(run.left) == "-"
    assert run.steps(1, 2.0) == 98 * 2.0
    assert run.steps(1, 4.0) == 97 * 3.0
    assert str(run.left) == "4:51"


def test_it_runs_down_between_steps_and_ends_with_the_last_one() -> None:
    run = Run(12)
    assert run.steps(10, 5.0) == 10.0
    run.now += 4.0
    assert run.left.seconds() == 6.0
    run.now += 60.0
    assert run.left.seconds() == 0.0
    assert run.steps(2, 1.0) is None


def test_old_steps_are_forgotten() -> None:
    run = Run(4 * STEPS)
    run.steps(STEPS, 10.0)
    assert run.steps(STEPS, 1.0) == pytest.approx(2 * STEPS)


def test_evaluations_and_saves_count_by_their_number_and_not_as_steps() -> None:
    run = Run(20, evaluation=5, save=8)
    assert run.steps(5, 1.0) == 15.0
    assert run.pause("evaluation", 7.0) == 15.0 + 3 * 7.0  # after 10, 15 and 20
    assert run.steps(3, 1.0) == 12.0 + 3 * 7.0
    assert run.pause("save", 2.0) == 12.0 + 3 * 7.0 + 2 * 2.0  # after 16, and at the end
    assert run.steps(2, 1.0) == 10.0 + 3 * 7.0 + 2 * 2.0  # that of step 10 comes now
    assert run.pause("evaluation", 6.0) == 10.0 + 2 * 6.0 + 2 * 2.0
    assert run.pause("save", 2.0) == 10.0 + 2 * 6.0 + 2 * 2.0  # asked for, beside the interval


def test_saves_without_an_interval_count_with_the_steps() -> None:
    run = Run(20, save=0)
    run.steps(5, 1.0)
    run.pause("save", 2.0)
    assert run.steps(5, 1.0) == pytest.approx(10 * 11 / 9)


def test_a_resumed_run_counts_from_its_start() -> None:
    run = Run(1000, 900, evaluation=100)
    assert run.steps(10, 3.0) == 90 * 3.0
    run.steps(90, 3.0)
    assert run.pause("evaluation", 5.0) is None
