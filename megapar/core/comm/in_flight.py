"""Collectives in flight on this rank: launched, and not waited for yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core.comm.accounts import WaitMeter
from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import Exchange
from megapar.core.comm.two_hops import TwoHops
from megapar.core.device.base import Device, Event, Stream
from megapar.errors import DistributedError


class CommContext:
    """Launcher of the exchanges of one model, which tracks them while they are in flight and waits for them.

    Attributes:
        chained: Names of axes whose collectives must never use the link at the same time. Each is launched after
            those in flight on the other chained axes.
        launched: Kind -> number of exchanges launched, forward and backward.
        host_waits: Number of times that the host waited for values from the device.
    """

    def __init__(
        self,
        meter: WaitMeter | None = None,
        device: Device | None = None,
        chained: frozenset[str] = frozenset(),
        on_host_wait: Callable[[str], None] | None = None,
    ) -> None:
        """Create a context; ``on_host_wait`` is called after each host wait with the function's name."""
        self.chained = chained
        self.launched: Counter[str] = Counter()
        self.host_waits = 0
        self.meter = WaitMeter() if meter is None else meter
        self.device = Device() if device is None else device
        self._on_host_wait = on_host_wait
        self._streams: dict[str, Stream] = {}
        # Keeps the objects alive: a lost ticket must not free buffers that a collective still writes to.
        self._open: dict[int, InFlight] = {}
        self._zeros: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    @property
    def in_flight(self) -> list[str]:
        """Names of the exchanges in flight, oldest first."""
        return [f"{flight.exchange.kind} over {flight.exchange.axis.name}" for flight in self._open.values()]

    def check_settled(self) -> None:
        """Raise DistributedError if anything is in flight, such as at the end of a step."""
        if self._open:
            raise DistributedError(f"launched and never waited for: {', '.join(self.in_flight)}")

    def count_host_wait(self, where: str) -> None:
        """Count one wait of the host for values from the device, in the function named ``where``."""
        self.host_waits += 1
        if self._on_host_wait is not None:
            self._on_host_wait(where)

    def zero(self, like: Tensor) -> Tensor:
        """Return one shared zero of ``like``'s device and dtype, for autograd handles: nothing reads its value."""
        key = like.device, like.dtype
        if key not in self._zeros:
            self._zeros[key] = like.new_zeros(1)
        return self._zeros[key].detach()

    def mark(self) -> tuple[InFlight, ...]:
        """Return the exchanges in flight now, for ``wait_since``."""
        return tuple(self._open.values())

    def wait_since(self, mark: tuple[InFlight, ...]) -> None:
        """Wait for every exchange launched since ``mark`` was taken, except ``owned`` ones."""
        before = {id(flight) for flight in mark}
        for flight in [flight for key, flight in self._open.items() if key not in before and not flight.owned]:
            self.wait(flight)

    def launch(self, exchange: Exchange, x: Tensor, side_stream: bool = False, owned: bool = False) -> InFlight:
        """Launch one exchange. The returned object keeps its input alive.

        Args:
            side_stream: The output will be used on a different stream than the current one.
            owned: Only the caller waits for it; ``wait_since`` does not.
        """
        x = x.contiguous()
        stream = self.device.current_stream()
        if exchange.axis.size == 1:
            output, work = x, None
        elif exchange.axis.name in self.chained:
            stream, side_stream = self._stream("link"), True
            output, work = self.device.launch(lambda: self._after_others(exchange, x), stream)
        elif self.device.is_async and isinstance(exchange, TwoHops):
            # The relay and the second hop follow the first there, while the current stream continues.
            stream, side_stream = self.stream(exchange.axis), True
            output, work = self.device.launch(lambda: exchange.launch(x), stream)
        else:
            output, work = self.device.launch(lambda: exchange.launch(x))
        # An exchange that sends nothing has no work to wait for, but its output is still computed on that stream.
        ready = stream.record_event() if side_stream and work is None else None
        flight = InFlight(exchange, x, output, work, side_stream, owned, ready)
        if work is not None:
            self.launched[exchange.kind] += 1
        self._open[id(flight)] = flight
        return flight

    def wait(self, flight: InFlight, metered: bool = True) -> Tensor:
        """Wait for one exchange and return its output. ``metered`` is False if the wait blocks only a side stream."""
        if flight.work is not None and not metered:
            flight.work.wait()
        elif flight.work is not None:
            self.meter.wait(flight.work, flight.kind)
        if flight.ready is not None:
            self.device.current_stream().wait_event(flight.ready)
        if flight.side_stream:
            self.device.adopt(flight.output)
        del self._open[id(flight)]
        return flight.output

    def _after_others(self, exchange: Exchange, x: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Launch after the exchanges in flight on the other chained axes. On a CPU the host has to wait for them."""
        for flight in self._open.values():
            axis = flight.exchange.axis
            if flight.work is not None and axis.name in self.chained and axis.name != exchange.axis.name:
                if self.device.is_async:
                    # Some works compute inside ``wait``; this runs that computation here, on the link's stream.
                    flight.work.wait()
                    flight.ready = self.device.event()
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

    Attributes:
        work: Handle to wait for; None if nothing is sent.
        side_stream: Launched on a different stream than the one that uses the output.
        owned: Only its caller waits for it.
        ready: Event after which the output is valid, if ``work`` does not cover it: it is None, or another stream has
            waited for it.
    """

    exchange: Exchange
    input: Tensor
    output: Tensor
    work: dist.Work | None
    side_stream: bool = False
    owned: bool = False
    ready: Event | None = None

    @property
    def kind(self) -> str:
        """Name under which the waiting time is counted: ``axis/kind``."""
        return f"{self.exchange.axis.name}/{self.exchange.kind}"
