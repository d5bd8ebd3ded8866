"""Start/wait pairs: collectives that fly while the program does something else, forward and backward.

    token, ticket = start(exchange, x, traffic)     launches
    ...                                             other work
    y = wait(token, ticket)                         waits

    forward    start: launch          wait: wait for it
    backward   wait: launch the conjugate    start: wait for it

A buffer in flight must not be touched, so it lives in the ticket, which is opaque on purpose (no pytree, no hook and no
cast gets inside). What passes through autograd between the two is the token, one element that requires a gradient;
with it the graph runs through both halves, and since autograd runs the newest ready node first, the backward order is
the mirror of the program order. Inputs are kept alive until their collective has been waited for.

Every rank of the axis must start the same exchanges in the same order, also where it has nothing to send. On an axis of
one rank nothing is launched and ``wait`` returns ``x``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core import transport
from megapar.core.axis import Axis
from megapar.core.meter import WaitMeter
from megapar.errors import DistributedError


class Exchange(Protocol):
    """One collective over an axis, along dim 0."""

    @property
    def axis(self) -> Axis:
        """Where it happens."""
        ...

    @property
    def kind(self) -> str:
        """What it is called in counts and messages."""
        ...

    def launch(self, x: Tensor) -> tuple[Tensor, dist.Work | None]:
        """The output, not there yet, and what to wait for; None where nothing travels. ``x`` is contiguous."""
        ...

    def conjugate(self) -> Exchange:
        """What the gradient goes through."""
        ...


@dataclass(frozen=True)
class AllToAll:
    """Rows to every rank and rows from every rank. Conjugate: the splits swapped.

    send, receive: rows for and from each rank of the axis; None, both: even pieces. kind: what it is counted as.
    """

    axis: Axis
    send: tuple[int, ...] | None = None
    receive: tuple[int, ...] | None = None
    kind: str = "all_to_all"

    def launch(self, x: Tensor) -> tuple[Tensor, dist.Work | None]:
        """[sum(send), ..] to [sum(receive), ..], in rank order."""
        rows = x.shape[0] if self.receive is None else sum(self.receive)
        y = x.new_empty((rows, *x.shape[1:]))
        return y, transport.all_to_all(y, x, self.axis, self.receive, self.send, async_op=True)

    def conjugate(self) -> AllToAll:
        """The way back."""
        return AllToAll(self.axis, self.receive, self.send, self.kind)


@dataclass(frozen=True)
class AllGather:
    """The rows of all ranks, the same number from each. Conjugate: ReduceScatter.

    into: where they go; then ``x`` may be this rank's rows of it. None: a new tensor.
    """

    axis: Axis
    into: Tensor | None = field(default=None, compare=False)
    kind: ClassVar[str] = "all_gather"

    def launch(self, x: Tensor) -> tuple[Tensor, dist.Work | None]:
        """[n, ..] to [size * n, ..]."""
        y = x.new_empty((self.axis.size * x.shape[0], *x.shape[1:])) if self.into is None else self.into
        return y, transport.all_gather(y, x, self.axis, async_op=True)

    def conjugate(self) -> ReduceScatter:
        """Every rank used the rows for a part of its own: the parts are summed."""
        return ReduceScatter(self.axis)


@dataclass(frozen=True)
class ReduceScatter:
    """This rank's even piece of the sum over all ranks. Conjugate: AllGather.

    into: where it goes. None: a new tensor.
    """

    axis: Axis
    into: Tensor | None = field(default=None, compare=False)
    kind: ClassVar[str] = "reduce_scatter"

    def launch(self, x: Tensor) -> tuple[Tensor, dist.Work | None]:
        """[size * n, ..] to [n, ..]."""
        y = x.new_empty((x.shape[0] // self.axis.size, *x.shape[1:])) if self.into is None else self.into
        return y, transport.reduce_scatter(y, x, self.axis, async_op=True)

    def conjugate(self) -> AllGather:
        """Each rank's rows reach what all ranks computed."""
        return AllGather(self.axis)


@dataclass(frozen=True)
class Reduce:
    """The sum over all ranks, on each of them. Conjugate: Copy.

    in_place: the sum replaces ``x``, which otherwise stays as it is.
    """

    axis: Axis
    in_place: bool = False
    kind: ClassVar[str] = "all_reduce"

    def launch(self, x: Tensor) -> tuple[Tensor, dist.Work | None]:
        """[n, ..] to [n, ..]."""
        y = x if self.in_place else x.clone()
        return y, transport.all_reduce(y, self.axis, async_op=True)

    def conjugate(self) -> Copy:
        """What follows a sum is the same on every rank, and so is the gradient."""
        return Copy(self.axis)


@dataclass(frozen=True)
class Copy:
    """The input of parts that differ per rank: nothing travels. Conjugate: Reduce."""

    axis: Axis
    kind: ClassVar[str] = "copy"

    def launch(self, x: Tensor) -> tuple[Tensor, dist.Work | None]:
        """[n, ..] as it is."""
        return x.detach(), None  # a tensor of its own: autograd writes the graph onto what ``wait`` returns

    def conjugate(self) -> Reduce:
        """The parts' gradients are summed."""
        return Reduce(self.axis)


class Traffic:
    """What the start/wait pairs of one layer or model have launched.

    launched: kind -> how many, forward and backward. meter: the time their waits took on the host.
    """

    def __init__(self, meter: WaitMeter | None = None) -> None:
        self.launched: Counter[str] = Counter()
        self.meter = WaitMeter() if meter is None else meter
        # Holds the flights themselves: a lost ticket must not free buffers that a collective still writes to.
        self._open: dict[int, Flight] = {}

    @property
    def in_flight(self) -> list[str]:
        """What has been launched and not waited for, oldest first."""
        return [f"{flight.exchange.kind} over {flight.exchange.axis.name}" for flight in self._open.values()]

    def check_settled(self) -> None:
        """Call where nothing may be in flight, such as the end of a step. Raises DistributedError naming what is."""
        if self._open:
            raise DistributedError(f"launched and never waited for: {', '.join(self.in_flight)}")

    def mark(self) -> tuple[Flight, ...]:
        """What is in flight now, for ``land_since``."""
        return tuple(self._open.values())

    def land_since(self, mark: tuple[Flight, ...]) -> None:
        """Wait for everything launched since ``mark`` was taken."""
        before = {id(flight) for flight in mark}
        for flight in [flight for key, flight in self._open.items() if key not in before]:
            self.land(flight)

    def launch(self, exchange: Exchange, x: Tensor) -> Flight:
        """Launch one collective; the flight keeps its input."""
        x = x.contiguous()
        output, work = exchange.launch(x)
        flight = Flight(exchange, x, output, work)
        if work is not None:
            self.launched[exchange.kind] += 1
        self._open[id(flight)] = flight
        return flight

    def land(self, flight: Flight) -> Tensor:
        """Wait for a flight and return its output."""
        if flight.work is not None:
            self.meter.wait(flight.work)
        del self._open[id(flight)]
        return flight.output


class Flight(NamedTuple):
    """A launched collective and the buffers that nobody may touch until it has been waited for."""

    exchange: Exchange
    input: Tensor
    output: Tensor
    work: dist.Work | None


class Ticket:
    """What ``start`` hands to ``wait``: the exchange and its buffers."""

    def __init__(self, exchange: Exchange, traffic: Traffic) -> None:
        self.exchange = exchange
        self.traffic = traffic
        self.there: Flight | None = None
        self.back: Flight | None = None
        self.waited = False
        self.held = False
        self.landed: Tensor | None = None

    def hold(self) -> None:
        """Keep the result after the wait: the ticket enters a recomputed unit, where it is waited for again."""
        self.held = True

    def claim(self) -> None:
        """Note the wait. Raises DistributedError the second time, unless the ticket is held."""
        if self.waited and not self.held:
            raise DistributedError(
                f"a ticket for {self.exchange.kind} over {self.exchange.axis.name} was waited for twice; "
                "hold() one that enters a recomputed unit"
            )
        self.waited = True

    def arrive(self) -> Tensor:
        """The result, waited for the first time and remembered where the ticket is held."""
        if self.there is not None:
            self.landed, self.there = self.traffic.land(self.there), None
        assert self.landed is not None
        if self.held:
            return self.landed.detach()
        output, self.landed = self.landed, None
        return output


def start(exchange: Exchange, x: Tensor, traffic: Traffic) -> tuple[Tensor, Ticket]:
    """Launch ``exchange`` on ``x``. Returns (token, ticket) for ``wait``; ``x`` must not be written until then."""
    ticket = Ticket(exchange, traffic)
    return (x if exchange.axis.size == 1 else _Start.apply(x, ticket)), ticket


def wait(token: Tensor, ticket: Ticket) -> Tensor:
    """The result of what ``start`` launched. Raises DistributedError for a ticket that was waited for already."""
    ticket.claim()
    return token if ticket.exchange.axis.size == 1 else _Wait.apply(token, ticket)  # type: ignore[no-any-return]


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ticket: Ticket) -> Tensor:
        ctx.ticket = ticket
        ticket.there = ticket.traffic.launch(ticket.exchange, x)
        return x.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ticket: Ticket = ctx.ticket
        if ticket.back is None:
            raise DistributedError(f"the gradient of {ticket.exchange.kind} was never sent: its wait had no backward")
        flight, ticket.back, ticket.landed = ticket.back, None, None
        return ticket.traffic.land(flight), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, ticket: Ticket) -> Tensor:
        ctx.ticket = ticket
        return ticket.arrive()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ticket: Ticket = ctx.ticket
        ticket.back = ticket.traffic.launch(ticket.exchange.conjugate(), grads[0])
        return grads[0].new_zeros(1), None
