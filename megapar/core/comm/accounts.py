"""The accounts of a world on this rank: time waited, bytes sent, and the last collectives launched."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch.distributed import Work


@dataclass
class Waits:
    """Waiting times of one interval of a run.

    Attributes:
        host: Kind -> seconds that the host waited.
        stalls: (kind, event before, event after) of each wait of a device's stream.
    """

    host: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    stalls: list[tuple[str, Any, Any]] = field(default_factory=list)

    def seconds(self) -> dict[str, float]:
        """Return kind -> seconds. Waits for the device until it has reached the last event."""
        total: dict[str, float] = dict(self.host)
        for kind, before, after in self.stalls:
            after.synchronize()
            total[kind] = total.get(kind, 0.0) + before.elapsed_time(after) / 1000
        return dict(sorted(total.items()))


class WaitMeter:
    """Sum of the time spent in ``wait``: the communication that was not overlapped, by axis and kind of collective.

    On a CPU a wait blocks the host, and the host's clock measures it. On an accelerator it blocks the stream, not the
    host. Two events around the wait then measure how long the stream was idle; they are read only when the log is
    written. A layer waits tens of times and every event costs a launch, so only some steps are timed there (``on``).
    ``mark`` records a timed event on the current stream; None if waits block the host. Waits are timed while ``on``.
    """

    def __init__(self, mark: Callable[[], Any] | None = None) -> None:
        self.on = True
        self._mark = mark
        self._waits = Waits()

    def wait(self, work: Work, kind: str) -> None:
        """Wait for a launched collective. ``kind`` is ``axis/collective``, as for the byte counts."""
        start = self._start()
        work.wait()
        self._end(kind, start)

    @contextmanager
    def around(self, kind: str) -> Iterator[None]:
        """Measure the wait for a blocking collective inside. ``kind`` is as for ``wait``."""
        start = self._start()
        yield
        self._end(kind, start)

    def _start(self) -> Any:
        """Return the time, an event, or None if waits are not timed."""
        return None if not self.on else time.perf_counter() if self._mark is None else self._mark()

    def _end(self, kind: str, start: Any) -> None:
        if start is None:
            return
        if self._mark is None:
            self._waits.host[kind] += time.perf_counter() - start
        else:
            self._waits.stalls.append((kind, start, self._mark()))

    def add(self, kind: str, seconds: float) -> None:
        """Add a wait of the host that was timed elsewhere."""
        if self.on:
            self._waits.host[kind] += seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not measure the waits inside."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before

    def take(self) -> Waits:
        """Return the waits since the last call."""
        waits, self._waits = self._waits, Waits()
        return waits


class CommBytes(Counter[tuple[str, str]]):
    """(axis, kind of collective) -> bytes that this rank has sent. All axes of a world share one instance."""

    def __init__(self) -> None:
        super().__init__()
        self._counting = True

    def add(self, axis: str, kind: str, sent_bytes: float) -> None:
        """Add the bytes that one collective sends, except inside ``uncounted``."""
        if self._counting:
            self[axis, kind] += round(sent_bytes)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Ignore what is sent inside, such as by a recomputed forward. May be nested."""
        before, self._counting = self._counting, False
        try:
            yield
        finally:
            self._counting = before

    def take(self) -> dict[str, int]:
        """Return "axis/kind" -> bytes since the last call, and start again from zero."""
        sent = {f"{axis}/{kind}": amount for (axis, kind), amount in sorted(self.items()) if amount}
        self.clear()
        return sent


class LaunchRecord(NamedTuple):
    """The launch of a collective.

    Attributes:
        axis: Name of the axis, or of its queue.
        number: Number of the launch on this axis, starting at 1.
        at: ``time.monotonic()`` of the launch, in seconds.
    """

    axis: str
    number: int
    kind: str
    at: float

    def __str__(self) -> str:
        return f"{self.kind} {self.number} on {self.axis}"


class FlightRecorder:
    """A ring buffer of launches, and the number of launches per axis since the start.

    Attributes:
        recent: The last ``size`` launches, oldest first.
        counts: Axis -> number of launches, finished or not.
    """

    def __init__(self, size: int = 64) -> None:
        self.recent: deque[LaunchRecord] = deque(maxlen=size)
        self.counts: Counter[str] = Counter()

    def note(self, axis: str, kind: str) -> None:
        """Record that a collective is about to be launched."""
        self.counts[axis] += 1
        self.recent.append(LaunchRecord(axis, self.counts[axis], kind, time.monotonic()))
