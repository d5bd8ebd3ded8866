"""The time that this rank waited for communication, by axis and kind of collective.

On a CPU a wait blocks the host, and the host's clock measures it. On an accelerator it blocks the stream, not the host:
two events around the wait measure how long the stream was idle, and are not read before the log is written. A layer
waits tens of times and every event costs a launch, so there only some steps are timed (``on``).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Work


@dataclass
class Waits:
    """Waiting times of one stretch of a run.

    host: kind -> seconds. stalls: (kind, event before, event after) of waits that a device's stream made.
    """

    host: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    stalls: list[tuple[str, Any, Any]] = field(default_factory=list)

    def seconds(self) -> dict[str, float]:
        """Kind -> seconds; the device has to have come this far, and is waited for where it has not."""
        total: dict[str, float] = dict(self.host)
        for kind, before, after in self.stalls:
            after.synchronize()
            total[kind] = total.get(kind, 0.0) + before.elapsed_time(after) / 1000
        return dict(sorted(total.items()))


class WaitMeter:
    """Sums the time spent in ``wait``: the communication that nothing hid.

    mark: records a timed event on the current stream; None where waits block the host. on: whether waits are timed.
    """

    def __init__(self, mark: Callable[[], Any] | None = None) -> None:
        self.on = True
        self._mark = mark
        self._waits = Waits()

    def wait(self, work: Work, kind: str) -> None:
        """Wait for a launched collective. kind: ``axis/collective``, as bytes are counted."""
        if not self.on:
            work.wait()
            return
        if self._mark is not None:
            before = self._mark()
            work.wait()
            self._waits.stalls.append((kind, before, self._mark()))
            return
        start = time.perf_counter()
        work.wait()
        self._waits.host[kind] += time.perf_counter() - start

    @contextmanager
    def around(self, kind: str) -> Iterator[None]:
        """A collective that is launched and waited for in here. kind: as for ``wait``."""
        if not self.on:
            yield
            return
        if self._mark is not None:
            before = self._mark()
            yield
            self._waits.stalls.append((kind, before, self._mark()))
            return
        start = time.perf_counter()
        yield
        self._waits.host[kind] += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not measure the waits inside."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before

    def take(self) -> Waits:
        """Return what was waited for since the last call."""
        waits, self._waits = self._waits, Waits()
        return waits
