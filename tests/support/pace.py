"""How slow the processor is at this moment, by which limits in seconds are stretched."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

USUAL_SECONDS = 0.11  # that the loop below takes on the machine that the limits were set on


@dataclass
class Seconds:
    """What a block took.

    Attributes:
        taken: Seconds of this process's processor, over how many times slower than usual that processor was.
    """

    taken: float = 0.0


def slowness() -> float:
    """How many times longer a loop of plain Python takes than usual; at least 1.

    A processor that others share runs the same instructions two to three times slower, in seconds of the processor too.
    """
    start = time.process_time()
    total = 0
    for number in range(1_000_000):
        total += number * number % 7
    assert total
    return max(1.0, (time.process_time() - start) / USUAL_SECONDS)


@contextmanager
def usual_seconds() -> Iterator[Seconds]:
    """The seconds of the processor that a block of plain Python would take on a machine that is not busy."""
    seconds, before, start = Seconds(), slowness(), time.process_time()
    yield seconds
    taken = time.process_time() - start
    seconds.taken = taken / max(before, slowness())
