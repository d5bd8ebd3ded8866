"""The garbage collector runs when a step says so, and only then."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from megapar.training.loop.callbacks import Collector


@pytest.fixture(autouse=True)
def _frozen_again() -> Iterator[None]:
    """As tests/conftest.py leaves it."""
    yield
    gc.collect()
    gc.freeze()


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_lives_until_the_step_that_collects():
    collector = Collector(3)
    collector.open()
    try:
        assert not gc.isenabled()
        garbage = weakref.ref(Cycle())
        alive = []
        for iteration in (1, 2, 3):
            collector.after_step(iteration)
            alive.append(garbage() is not None)
    finally:
        collector.close()
    assert alive == [True, True, False]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
