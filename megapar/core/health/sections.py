"""What every thread of this rank is doing for how long, and how long that may take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

FIRST, STEP = "first-step", "step"
LEAST_SECONDS = 600.0
FACTOR = 10


@dataclass
class Section:
    """A stretch of work of one thread. began: by the clock, later by as long as what lay inside took.

    told: seconds at which it was last told to be slow. compiled: how much was compiled before.
    """

    name: str
    detail: str
    began: float
    thread: int
    compiled: int
    told: float = 0.0


class Overdue(NamedTuple):
    """A section that takes too long. limit: in seconds. ends: whether that is to end the run."""

    name: str
    detail: str
    seconds: float
    limit: float
    ends: bool


class Sections:
    """Of one rank; every thread has its own, one inside the other, of which the innermost counts.

    limits: name -> seconds after which a section ends the run. Others are learned: least_seconds, or ``FACTOR`` times
    the longest so far, after which a section is told, again when it has taken twice as long. compiled: how much was
    compiled so far; a step in which something is counts as a first one. clock: in seconds.
    """

    def __init__(
        self,
        limits: Mapping[str, float],
        *,
        least_seconds: float = LEAST_SECONDS,
        compiled: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = dict(limits)
        self._least = least_seconds
        self._compiled = compiled
        self._clock = clock
        self._stacks: dict[int, list[Section]] = {}
        self._longest: dict[str, float] = {}
        self._lock = threading.Lock()

    def begin(self, name: str, detail: str = "") -> None:
        """This thread begins something; what it was at waits."""
        thread = threading.get_ident()
        section = Section(name, detail, self._clock(), thread, self._compiled())
        with self._lock:
            self._stacks.setdefault(thread, []).append(section)

    def end(self) -> None:
        """It is done."""
        with self._lock:
            thread = threading.get_ident()
            stack = self._stacks[thread]
            section = stack.pop()
            seconds = self._clock() - section.began
            kind = self._kind(section)
            self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))
            if stack:
                stack[-1].began += seconds
            else:
                del self._stacks[thread]

    def end_all(self) -> None:
        """This thread is done with everything."""
        while threading.get_ident() in self._stacks:
            self.end()

    @contextmanager
    def inside(self, name: str, detail: str = "") -> Iterator[None]:
        """Begin and end."""
        self.begin(name, detail)
        try:
            yield
        finally:
            self.end()

    def open(self) -> list[Section]:
        """The innermost of every thread, the one that began first in front."""
        with self._lock:
            return sorted((stack[-1] for stack in self._stacks.values()), key=lambda section: section.began)

    def seconds(self, section: Section) -> float:
        """How long it has taken so far."""
        return self._clock() - section.began

    def overdue(self) -> Overdue | None:
        """What has taken too long: what is to end the run before what is to be told, which is given once."""
        slow: tuple[Section, Overdue] | None = None
        for section in self.open():
            kind, seconds = self._kind(section), self.seconds(section)
            if kind in self.limits:
                if seconds > self.limits[kind]:
                    return Overdue(kind, section.detail, seconds, self.limits[kind], True)
                continue
            limit = max(self._least, FACTOR * self._longest.get(kind, 0.0), 2 * section.told)
            if seconds > limit and slow is None:
                slow = section, Overdue(kind, section.detail, seconds, limit, False)
        if slow is None:
            return None
        slow[0].told = slow[1].seconds
        return slow[1]

    def _kind(self, section: Section) -> str:
        return FIRST if section.name == STEP and self._compiled() > section.compiled else section.name
