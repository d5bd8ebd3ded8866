"""Collectives in flight on this rank: launched, and not waited for yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import Exchange
from megapar.core.comm.meter import WaitMeter
from megapar.core.device.base import Device, Event, Stream
from megapar.errors import DistributedError


class CommContext:
    """Launches the exchanges of one model, keeps them while they are in flight, and waits for them.

    launched: kind -> how many, forward and backward. host_waits: how often the host waited for numbers of the device.
    on_host_wait: called after each of these waits with the name of the function that waited.
    meter: the time that waits for collectives took. device: launches them. chained: names of axes whose collectives
    never use the link at the same time: each is launched after those in flight on the others.
    """

    def __init__(
        self,
        meter: WaitMeter | None = None,
        device: Device | None = None,
        chained: frozenset[str] = frozenset(),
        on_host_wait: Callable[[str], None] | None = None,
    ) -> None:
        self.chained = chained
        self.launched: Counter[str] = Counter()
        self.host_waits = 0
        self.meter = WaitMeter() if meter is None else meter
        self.device = Device() if device is None else device
        self._on_host_wait = on_host_wait
        self._streams: dict[str, Stream] = {}
        # The objects themselves: a lost ticket must not free buffers that a collective still writes to.
        self._open: dict[int, InFlight] = {}

    @property
    def in_flight(self) -> list[str]:
        """Names of the exchanges in flight, oldest first."""
        return [f"{flight.exchange.kind} over {flight.exchange.axis.name}" for flight in self._open.values()]

    def check_settled(self) -> None:
        """Call where nothing may be in flight, such as the end of a step. Raises DistributedError naming what is."""
        if self._open:
            raise DistributedError(f"launched and never waited for: {', '.join(self.in_flight)}")

    def count_host_wait(self, where: str) -> None:
        """Count one wait of the host for numbers of the device. where: the function that waited."""
        self.host_waits += 1
        if self._on_host_wait is not None:
            self._on_host_wait(where)

    def mark(self) -> tuple[InFlight, ...]:
        """Return what is in flight now, for ``wait_since``."""
        return tuple(self._open.values())

    def wait_since(self, mark: tuple[InFlight, ...]) -> None:
        """Wait for every exchange launched since ``mark`` was taken, except those that are ``owned``."""
        before = {id(flight) for flight in mark}
        for flight in [flight for key, flight in self._open.items() if key not in before and not flight.owned]:
            self.wait(flight)

    def launch(self, exchange: Exchange, x: Tensor, aside: bool = False, owned: bool = False) -> InFlight:
        """Launch one exchange; what is returned keeps its input alive.

        aside: the output will be used on another stream than the current one. owned: only the caller waits for it.
        """
        x = x.contiguous()
        stream = self.device.current_stream()
        if exchange.axis.size == 1:
            output, work = x, None
        elif exchange.axis.name in self.chained:
            stream, aside = self._stream("link"), True
            output, work = self.device.launch(lambda: self._after_others(exchange, x), stream)
        else:
            output, work = self.device.launch(lambda: exchange.launch(x))
        # Where nothing travels there is no work to wait for, but the output is made on that stream all the same.
        made = stream.record_event() if aside and work is None else None
        flight = InFlight(exchange, x, output, work, aside, owned, made)
        if work is not None:
            self.launched[exchange.kind] += 1
        self._open[id(flight)] = flight
        return flight

    def wait(self, flight: InFlight, metered: bool = True) -> Tensor:
        """Wait for one exchange and return its output. metered: False where the wait holds up only a side stream."""
        if flight.work is not None and not metered:
            flight.work.wait()
        elif flight.work is not None:
            self.meter.wait(flight.work, flight.kind)
        if flight.made is not None:
            self.device.current_stream().wait_event(flight.made)
        if flight.aside:
            self.device.adopt(flight.output)
        del self._open[id(flight)]
        return flight.output

    def _after_others(self, exchange: Exchange, x: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Launch after what is in flight on the other chained axes; on a CPU the host has to wait for that."""
        for flight in self._open.values():
            axis = flight.exchange.axis
            if flight.work is not None and axis.name in self.chained and axis.name != exchange.axis.name:
                if self.device.is_async:
                    # Some works compute when they are waited for: then that is done here, on the link's stream.
                    flight.work.wait()
                    flight.made = self.device.event()
                else:
                    self.meter.wait(flight.work, flight.kind)
        return exchange.launch(x)

    def stream(self, axis: Axis) -> Stream:
        """Return the side stream of an axis."""
        return self._stream(axis.name)

    def _stream(self, name: str) -> Stream:
        if name not in self._streams:
            self._streams[name] = self.device.new_stream(urgent=True)
        return self._streams[name]


@dataclass(eq=False)
class InFlight:
    """An exchange in flight, with the buffers that must not be touched until it has been waited for.

    work: what to wait for; None where nothing travels. aside: launched on another stream than it is used on. owned:
    only its caller waits for it. made: the event after which the output is there, where ``work`` does not show it:
    there is none, or another stream has waited for it.
    """

    exchange: Exchange
    input: Tensor
    output: Tensor
    work: dist.Work | None
    aside: bool = False
    owned: bool = False
    made: Event | None = None

    @property
    def kind(self) -> str:
        """The name under which its waiting time is counted."""
        return f"{self.exchange.axis.name}/{self.exchange.kind}"
