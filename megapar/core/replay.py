"""What the two runs of a recomputed unit, forward and again, know of each other.

forward    .. counts^v dispatch^v experts  combine^v      counts are remembered
again      ..          dispatch^v experts                 counts are there; the last product is not made: its value
                                                          is the unit's output, which nobody needs twice
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Replay:
    """One unit in one micro-batch; lives as long as the unit's graph does. again: it is being recomputed."""

    def __init__(self) -> None:
        self.again = False
        self._found: list[Any] = []
        self._next = 0

    def start(self) -> None:
        """From here on the unit runs again, from its beginning."""
        self.again, self._next = True, 0

    def stop(self) -> None:
        """The recomputation is over, whether it came to the unit's end or not."""
        self.again = False

    def once(self, find: Callable[[], T]) -> T:
        """What ``find`` gave in the forward; called in the order of the program."""
        if not self.again:
            self._found.append(find())
            return self._found[-1]  # type: ignore[no-any-return]
        self._next += 1
        return self._found[self._next - 1]  # type: ignore[no-any-return]


def once(replay: Replay | None, find: Callable[[], T]) -> T:
    """``replay.once(find)``; outside recomputed units ``find()``."""
    return find() if replay is None else replay.once(find)
