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

Where sizes come from the device, a message cannot be built where it stands in the program without holding up the host.
``defer`` puts its autograd node there, and ``Deferred.launch`` sends it later: the order of the graph is that of the
program, whatever the order in which things are issued.

    tokens, deferred = defer(inputs, count, traffic)      the node; ``count`` messages will be sent
    ...                                                   the sizes arrive
    deferred.launch(message, exchanges, after)            builds the message and launches its parts
    y = wait(tokens[i], deferred.tickets[i])
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core import transport
from megapar.core.axis import Axis
from megapar.core.device.base import Device, Event, Stream
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


@dataclass(frozen=True)
class SendReceive:
    """A message to one rank of the axis and one from another, of one shape. Conjugate: the way back.

    to, source: ranks of the axis; None: nothing is sent, or nothing comes and the result is zeros.
    """

    axis: Axis
    to: int | None
    source: int | None
    kind: ClassVar[str] = "send"

    def launch(self, x: Tensor) -> tuple[Tensor, dist.Work | None]:
        """[n, ..] to [n, ..]."""
        y = torch.zeros_like(x) if self.source is None else torch.empty_like(x)
        return y, transport.send_receive(y, x, self.axis, self.to, self.source)

    def conjugate(self) -> SendReceive:
        """The gradient goes to where the message came from."""
        return SendReceive(self.axis, self.source, self.to)


@dataclass(frozen=True)
class Unsent:
    """In place of an exchange whose result nobody needs: nothing travels, zeros come. Conjugate: zeros back."""

    exchange: AllToAll

    @property
    def axis(self) -> Axis:
        """Where it would happen."""
        return self.exchange.axis

    @property
    def kind(self) -> str:
        """What it would be."""
        return self.exchange.kind

    def launch(self, x: Tensor) -> tuple[Tensor, None]:
        """[sum(send), ..] to zeros [sum(receive), ..]."""
        rows = x.shape[0] if self.exchange.receive is None else sum(self.exchange.receive)
        return x.new_zeros((rows, *x.shape[1:])), None

    def conjugate(self) -> Unsent:
        """What was not sent has no gradient."""
        return Unsent(self.exchange.conjugate())


class Traffic:
    """What the start/wait pairs of one layer or model have launched.

    launched: kind -> how many, forward and backward. host_waits: how often the host waited for numbers of the device.
    meter: the time that waits for collectives took. device: what launches. chained: names of axes whose collectives
    never use the link at once: each is launched behind what flies on the others.
    """

    def __init__(
        self,
        meter: WaitMeter | None = None,
        device: Device | None = None,
        chained: frozenset[str] = frozenset(),
    ) -> None:
        self.chained = chained
        self.launched: Counter[str] = Counter()
        self.host_waits = 0
        self.meter = WaitMeter() if meter is None else meter
        self.device = Device() if device is None else device
        self._streams: dict[str, Stream] = {}
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

    def launch(self, exchange: Exchange, x: Tensor, aside: bool = False) -> Flight:
        """Launch one collective; the flight keeps its input. aside: the current stream is not where it will be used."""
        x = x.contiguous()
        if exchange.axis.size == 1:
            output, work = x, None
        elif exchange.axis.name in self.chained:
            output, work = self.device.launch(lambda: self._behind_others(exchange, x), self._stream("link"))
            aside = True
        else:
            output, work = self.device.launch(lambda: exchange.launch(x))
        flight = Flight(exchange, x, output, work, aside)
        if work is not None:
            self.launched[exchange.kind] += 1
        self._open[id(flight)] = flight
        return flight

    def land(self, flight: Flight, metered: bool = True) -> Tensor:
        """Wait for a flight and return its output. metered: False where the wait holds up only a stream of its own."""
        if flight.work is not None and not metered:
            flight.work.wait()
        elif flight.work is not None:
            self.meter.wait(flight.work, flight.kind)
        if flight.aside:
            self.device.adopt(flight.output)
        del self._open[id(flight)]
        return flight.output

    def _behind_others(self, exchange: Exchange, x: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Launch behind what is in flight on the other chained axes; on a CPU the host has to wait for that."""
        for flight in self._open.values():
            axis = flight.exchange.axis
            if flight.work is not None and axis.name in self.chained and axis.name != exchange.axis.name:
                if self.device.runs_ahead:
                    flight.work.wait()
                else:
                    self.meter.wait(flight.work, flight.kind)
        return exchange.launch(x)

    def stream(self, axis: Axis) -> Stream:
        """The axis' own stream."""
        return self._stream(axis.name)

    def _stream(self, name: str) -> Stream:
        if name not in self._streams:
            self._streams[name] = self.device.new_stream()
        return self._streams[name]


class Flight(NamedTuple):
    """A launched collective and the buffers that nobody may touch until it has been waited for."""

    exchange: Exchange
    input: Tensor
    output: Tensor
    work: dist.Work | None
    aside: bool = False

    @property
    def kind(self) -> str:
        """What its waiting time is counted as."""
        return f"{self.exchange.axis.name}/{self.exchange.kind}"


class Ticket:
    """What ``start`` hands to ``wait``: the exchange and its buffers."""

    def __init__(self, exchange: Exchange | None, traffic: Traffic) -> None:
        self._exchange = exchange
        self.traffic = traffic
        self.there: Flight | None = None
        self.back: Flight | None = None
        self.waited = False
        # On one rank what ``start`` was given is the token; what a deferred one will carry is not made yet.
        self.passes = exchange is not None and exchange.axis.size == 1

    @property
    def exchange(self) -> Exchange:
        """What it is for. Raises DistributedError before a deferred one has been launched."""
        if self._exchange is None:
            raise DistributedError("a deferred ticket was waited for before its launch")
        return self._exchange

    def claim(self) -> None:
        """Note the wait. Raises DistributedError the second time, and before a deferred launch."""
        exchange = self.exchange
        if self.waited:
            raise DistributedError(
                f"a ticket for {exchange.kind} over {exchange.axis.name} was waited for twice; what flies into a "
                "recomputed unit arrives through Replay.arrival"
            )
        self.waited = True

    def arrive(self) -> Tensor:
        """The result."""
        flight, self.there = self.there, None
        assert flight is not None
        return self.traffic.land(flight)


def start(exchange: Exchange, x: Tensor, traffic: Traffic) -> tuple[Tensor, Ticket]:
    """Launch ``exchange`` on ``x``. Returns (token, ticket) for ``wait``; ``x`` must not be written until then."""
    ticket = Ticket(exchange, traffic)
    return (x if ticket.passes else _Start.apply(x, ticket)), ticket


def wait(token: Tensor, ticket: Ticket) -> Tensor:
    """The result of what ``start`` launched. Raises DistributedError for a ticket that was waited for already."""
    ticket.claim()
    return token if ticket.passes else _Wait.apply(token, ticket)  # type: ignore[no-any-return]


def copy_gradient(y: Tensor) -> Tensor:
    """``y`` behind a ``wait`` where its gradient is somebody else's too, as behind a sum: then a copy of it travels."""
    return _CopyGradient.apply(y)  # type: ignore[no-any-return]


class _CopyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].clone()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ticket: Ticket) -> Tensor:
        ctx.ticket = ticket
        ctx.save_for_backward(x.new_empty(0))
        ticket.there = ticket.traffic.launch(ticket.exchange, x)
        return x.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ticket: Ticket = ctx.ticket
        if ticket.back is None:
            raise DistributedError(f"the gradient of {ticket.exchange.kind} was never sent: its wait had no backward")
        # Inside a recomputed unit this asks for it to be run again, here, where the gradient is still in flight.
        _ = ctx.saved_tensors
        flight, ticket.back = ticket.back, None
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


class Message(Protocol):
    """What is built from tensors when its sizes are known, outside autograd."""

    def build(self, *inputs: Tensor) -> Tensor:
        """[R, ..] rows from the inputs of the node."""
        ...

    def gradients(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The inputs' gradients from that of the rows."""
        ...


class Deferred:
    """A message whose place in the program has passed and whose launch is to come. tickets: one per part."""

    def __init__(self, count: int, traffic: Traffic) -> None:
        self.tickets = tuple(Ticket(None, traffic) for _ in range(count))
        self._traffic = traffic
        self._inputs: tuple[Tensor, ...] = ()
        self._message: Message | None = None
        self._unsent: list[tuple[Ticket, Exchange, Tensor]] = []

    def launch(
        self,
        message: Message,
        exchanges: Sequence[Exchange],
        rows: Sequence[int],
        after: Event | None = None,
        *,
        first_only: bool = False,
    ) -> None:
        """Build the message and send its parts, each ``rows`` of it through one exchange, in order.

        after: the event behind which the inputs are there; the launch then waits for nothing else, on the stream of
        the axis. first_only: the other parts go with ``send_next``. Raises DistributedError the second time.
        """
        if self._message is not None:
            raise DistributedError("a deferred message was launched twice")
        self._message, inputs, self._inputs = message, self._inputs, ()
        traffic, aside = self._traffic, after is not None
        stream = traffic.stream(exchanges[0].axis) if aside else None

        @torch.no_grad()
        def send() -> None:
            parts = message.build(*inputs).split(list(rows))
            self._unsent = list(zip(self.tickets, exchanges, parts, strict=True))
            while self._unsent:
                self.send_next(aside)
                if first_only:
                    break

        traffic.device.launch(send, stream, after)

    def send_next(self, aside: bool = False) -> None:
        """Send the first part that has not been sent; nothing where all have been."""
        if self._unsent:
            ticket, exchange, part = self._unsent.pop(0)
            ticket._exchange = exchange
            ticket.there = self._traffic.launch(exchange, part, aside)

    def take(self) -> tuple[Tensor | None, ...]:
        """Land the gradients of all parts and make the inputs'."""
        flights = [ticket.back for ticket in self.tickets]
        if self._message is None or any(flight is None for flight in flights):
            raise DistributedError("the gradient of a deferred message was never sent: its wait had no backward")
        for ticket in self.tickets:
            ticket.back = None
        grads = [self._traffic.land(flight) for flight in flights if flight is not None]
        return self._message.gradients(grads[0] if len(grads) == 1 else torch.cat(grads))


def defer(inputs: Sequence[Tensor], count: int, traffic: Traffic) -> tuple[tuple[Tensor, ...], Deferred]:
    """(``count`` tokens, the deferred message): the node of a message of ``count`` parts that is launched later.

    The inputs must not be written until all parts have been waited for.
    """
    deferred = Deferred(count, traffic)
    return _Defer.apply(deferred, *inputs), deferred


class _Defer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, deferred: Deferred, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.deferred = deferred
        deferred._inputs = tuple(x.detach() for x in inputs)
        return tuple(inputs[0].new_zeros(1) for _ in deferred.tickets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.deferred.take()
