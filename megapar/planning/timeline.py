"""A program of computations and messages, run on one rank: one compute stream, and links that messages share.

A program is a list of events in the order in which the compute stream reaches them: work, the launch of a message, the
wait for it. A message starts when it has been launched, when the message before it on its stream (one per axis) has
ended, and, on each link that it uses, when that link is free. Links serve messages in the order of their launches.
A message across nodes uses the links within and between nodes at once. Work that runs while messages travel is slower
by ``shown`` seconds for each second of a message, because both use the units and the memory of a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

INSIDE, BETWEEN, TO_HOST, TO_DEVICE = "inside", "between", "to_host", "to_device"
LINKS = (INSIDE, BETWEEN, TO_HOST, TO_DEVICE)


class Flight(NamedTuple):
    """A message.

    Attributes:
        stream: Messages of one stream run one after another.
        loads: Seconds in which it keeps each link busy.
        latency: Seconds that it takes beyond those.
    """

    stream: str
    loads: tuple[tuple[str, float], ...]
    latency: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds from start to end if all links are free."""
        return max((seconds for _, seconds in self.loads), default=0.0) + self.latency


class Work(NamedTuple):
    """A computation."""

    name: str
    seconds: float


class Send(NamedTuple):
    """The launch of a message, which nothing waits for here.

    Attributes:
        after: Name of a launched message that must end first; "" for none.
    """

    name: str
    flight: Flight
    after: str = ""


class Wait(NamedTuple):
    """The wait of the compute stream for a message."""

    name: str


Event = Work | Send | Wait


class Bar(NamedTuple):
    """A bar of a drawing: what a lane (``compute``, ``wait`` or a link) does from start to end."""

    lane: str
    name: str
    start: float
    end: float


class Span(NamedTuple):
    """Sums over a program that has run.

    Attributes:
        seconds: From its start to the end of its last event.
        waited: Seconds in which the compute stream waited for messages.
        slowed: Seconds by which messages in flight slowed computations.
        busy: Seconds in which each link was busy, in the order of ``LINKS``.
    """

    seconds: float = 0.0
    waited: float = 0.0
    slowed: float = 0.0
    busy: tuple[float, ...] = (0.0,) * len(LINKS)

    @property
    def exposed(self) -> float:
        """Seconds that communication adds to the computations."""
        return self.waited + self.slowed

    def plus(self, other: Span, times: float = 1.0) -> Span:
        """Return the sums of this program and of ``times`` runs of another one after it."""
        return Span(
            self.seconds + times * other.seconds,
            self.waited + times * other.waited,
            self.slowed + times * other.slowed,
            tuple(mine + times * its for mine, its in zip(self.busy, other.busy, strict=True)),
        )


@dataclass
class Timeline:
    """A rank that runs programs one after another.

    Attributes:
        shown: Seconds of work that each second of a message in flight costs.
        now: Time of the compute stream.
        waited: Seconds waited so far.
        bars: What each lane did, if ``drawn``.
        aside: Streams whose messages nothing waits for, because another computation covers them.
    """

    shown: float = 0.0
    drawn: bool = False
    aside: frozenset[str] = frozenset()
    now: float = 0.0
    waited: float = 0.0
    bars: list[Bar] = field(default_factory=list)
    _messages: float = 0.0
    _free: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LINKS, 0.0))
    _busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LINKS, 0.0))
    _streams: dict[str, float] = field(default_factory=dict)
    _ends: dict[str, float] = field(default_factory=dict)

    def run(self, program: Iterable[Event]) -> Span:
        """Run a program to the end of its last event, and return the sums since the start."""
        for event in program:
            if isinstance(event, Work):
                self._bar("compute", event.name, self.now, self.now + event.seconds)
                self.now += event.seconds
            elif isinstance(event, Send):
                self._launch(event)
            else:
                end = self._ends[event.name]
                if end > self.now:
                    self._bar("wait", event.name, self.now, end)
                    self.waited += end - self.now
                    self.now = end
        slowed = self.shown * max(0.0, self._messages - self.waited)
        return Span(self.now + slowed, self.waited, slowed, tuple(self._busy[link] for link in LINKS))

    def _launch(self, event: Send) -> None:
        flight = event.flight
        self._messages += flight.seconds
        if flight.stream in self.aside:
            self._ends[event.name] = self.now
            for link, seconds in flight.loads:
                self._busy[link] += seconds
            return
        ready = max(self.now, self._streams.get(flight.stream, 0.0), self._ends.get(event.after, 0.0))
        last = ready
        for link, seconds in flight.loads:
            start = max(ready, self._free[link])
            self._free[link] = end = start + seconds
            self._busy[link] += seconds
            self._bar(link, event.name, start, end)
            last = max(last, end)
        self._ends[event.name] = self._streams[flight.stream] = last + flight.latency

    def _bar(self, lane: str, name: str, start: float, end: float) -> None:
        if self.drawn and end > start:
            self.bars.append(Bar(lane, name, start, end))


@dataclass(frozen=True)
class ProgramPart:
    """A part of a program, forward and backward.

    Attributes:
        backward: Its events in the backward, which runs the parts of a program in reverse.
        weight: Seconds of weight gradients that the schedule runs apart from the backward.
        again: Its events when a unit is recomputed; None for those of the forward.
        leads: Its backward only launches messages, which travel while the unit before it is recomputed.
    """

    forward: tuple[Event, ...] = ()
    backward: tuple[Event, ...] = ()
    weight: float = 0.0
    again: tuple[Event, ...] | None = None
    leads: bool = False


def forward_of(program: Sequence[ProgramPart]) -> Iterator[Event]:
    """Yield the events of a forward."""
    for part in program:
        yield from part.forward


def backward_of(program: Sequence[ProgramPart], *, recomputed: bool) -> Iterator[Event]:
    """Yield the events of a backward: the mirror of the program, as autograd runs it.

    A recomputed unit first launches what its last parts only launch, then runs again, then its backward.
    """
    turned = list(reversed(program))
    leading = next((place for place, part in enumerate(turned) if not part.leads), len(turned)) if recomputed else 0
    for part in turned[:leading]:
        yield from part.backward
    if recomputed:
        for part in program:
            yield from part.forward if part.again is None else part.again
    for part in turned[leading:]:
        yield from part.backward
