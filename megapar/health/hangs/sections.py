"""Sections: the current activity of each thread of this rank, its time so far, and its time limit."""

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
    """A named activity of one thread.

    Attributes:
        name: Such as "step" or "save".
        detail: Such as the iteration.
        began: Start in seconds of the clock, plus the time of the sections inside it, which does not count.
        compiled: The count of compilations at the start.
        inside_seconds: Time of the sections inside it that have ended.
        reported_seconds: The time at which it was last reported as slow.
    """

    name: str
    detail: str
    began: float
    thread: int
    compiled: int
    reported_seconds: float = 0.0
    inside_seconds: float = 0.0


class Overdue(NamedTuple):
    """A section that takes too long.

    Attributes:
        limit: Limit in seconds; 0 if another rank raised the alarm.
    """

    name: str
    detail: str
    seconds: float
    limit: float
    ends: bool


class Sections:
    """The sections of one rank. Each thread has a stack of them, and only the time of the innermost counts.

    Args:
        limits: Section name to the seconds after which the run ends. A section without a limit is reported after
            ``least_seconds`` and ``FACTOR`` times the longest one so far, and again after twice the time of a report.
        compiled: Returns the count of compilations so far. A step with a compilation counts as a first step.
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
        """Begin a section of this thread inside its current one, whose time stops."""
        thread = threading.get_ident()
        section = Section(name, detail, self._clock(), thread, self._compiled())
        with self._lock:
            self._stacks.setdefault(thread, []).append(section)

    def end(self) -> None:
        """End the innermost section of this thread."""
        with self._lock:
            thread = threading.get_ident()
            stack = self._stacks[thread]
            section = stack.pop()
            seconds = self._clock() - section.began
            kind = self._kind(section)
            self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))
            if stack:
                stack[-1].began += seconds + section.inside_seconds
                stack[-1].inside_seconds += seconds + section.inside_seconds
            else:
                del self._stacks[thread]

    def end_all(self) -> None:
        """End all sections of this thread."""
        while threading.get_ident() in self._stacks:
            self.end()

    @contextmanager
    def inside(self, name: str, detail: str = "") -> Iterator[None]:
        """Run the block as a section."""
        self.begin(name, detail)
        try:
            yield
        finally:
            self.end()

    def open(self) -> list[Section]:
        """Return the innermost section of every thread, the earliest first."""
        with self._lock:
            return sorted((stack[-1] for stack in self._stacks.values()), key=lambda section: section.began)

    def seconds(self, section: Section) -> float:
        """Return the time of a section so far."""
        return self._clock() - section.began

    def overdue(self) -> Overdue | None:
        """Return a section that takes too long: one that ends the run, else one to report, which is returned once."""
        slow: tuple[Section, Overdue] | None = None
        for section in self.open():
            kind, seconds = self._kind(section), self.seconds(section)
            if kind in self.limits:
                if seconds > self.limits[kind]:
                    return Overdue(kind, section.detail, seconds, self.limits[kind], True)
                continue
            limit = max(self._least, FACTOR * self._longest.get(kind, 0.0), 2 * section.reported_seconds)
            if seconds > limit and slow is None:
                slow = section, Overdue(kind, section.detail, seconds, limit, False)
        if slow is None:
            return None
        slow[0].reported_seconds = slow[1].seconds
        return slow[1]

    def _kind(self, section: Section) -> str:
        return FIRST if section.name == STEP and self._compiled() > section.compiled else section.name
