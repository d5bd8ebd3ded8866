"""The dynamic loss scale: grows after good steps, shrinks after overflows, never below its minimum."""

from __future__ import annotations

from dataclasses import replace

from megapar.core.optimizer.loss_scale import LossScale

START = LossScale(value=16.0, minimum=4.0, factor=2.0, window=3, hysteresis=2)


def values(scale: LossScale, steps: str) -> list[float]:
    """The scale after each step; ``.`` is a good one, ``x`` an overflow."""
    found = []
    for step in steps:
        scale.update(overflow=step == "x")
        found.append(scale.value)
    return found


def test_it_grows_after_a_window_of_good_steps_in_a_row() -> None:
    assert values(replace(START), "......") == [16, 16, 32, 32, 32, 64]
    assert values(replace(START), "..x...") == [16, 16, 16, 16, 16, 32]


def test_hysteresis_passes_over_overflows_until_the_next_growth() -> None:
    assert values(replace(START), "xx.x") == [16, 8, 8, 4]
    assert values(replace(START), "x...xx") == [16, 16, 16, 32, 32, 16]


def test_the_minimum_holds_and_is_noticed() -> None:
    scale = replace(START, hysteresis=1, chances=1)
    assert values(scale, "x") == [8]
    assert not scale.exhausted
    assert values(scale, "xx") == [4, 4]
    assert scale.exhausted
    assert values(scale, "...") == [4, 4, 8]
    assert not scale.exhausted


def test_a_restored_scale_goes_on_where_it_was() -> None:
    first, second = replace(START), replace(START)
    values(first, "xx.")
    second.restore(first.state())
    assert second == first


def test_a_window_shorter_than_the_steps_of_the_loaded_scale_ends() -> None:
    scale = replace(START, window=3, good_steps=7)
    assert values(scale, ".") == [32]
    assert scale.good_steps == 0
