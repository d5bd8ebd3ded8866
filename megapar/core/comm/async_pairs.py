"""Asynchronous collectives under autograd: in flight while the program does something else, forward and backward.

    token, ticket = start(exchange, x, comm)        launches
    ...                                             other work
    y = wait(token, ticket)                         waits

    forward    start: launch          wait: wait for it
    backward   wait: launch the conjugate    start: wait for it

The ticket stands for the collective between the two calls. A buffer in flight must not be touched, so it is in the
ticket, which is opaque on purpose: no pytree, hook or cast gets inside. The token is what passes through autograd
meanwhile, one element that requires a gradient. It connects both halves in the graph, and as autograd runs the newest
ready node first, the backward order is the mirror of the program order. Inputs are kept alive until their collective
has been waited for.

Every rank of the axis must start the same exchanges in the same order, also where it has nothing to send. On an axis of
one rank nothing is launched and ``wait`` returns ``x``.

Where sizes come from the device, building a message at its place in the program would hold up the host. ``defer`` puts
its autograd node there, and ``Deferred.launch`` sends it later: the graph has the order of the program, whatever the
order in which things are issued.

    tokens, deferred = defer(inputs, count, comm)         the node; ``count`` messages will be sent
    ...                                                   the sizes arrive
    deferred.launch(builder, exchanges, rows, after)      builds the message and launches its parts
    y = wait(tokens[i], deferred.tickets[i])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megapar.core.comm.exchange import Exchange
from megapar.core.comm.in_flight import CommContext, InFlight
from megapar.core.device.base import Event
from megapar.errors import DistributedError


class Ticket:
    """A collective between ``start`` and ``wait``, forward and backward.

    there, back: it and its conjugate while they are in flight. waited: ``wait`` was called. passes: on an axis of one
    rank nothing is launched, and the token is the input itself.
    """

    def __init__(self, exchange: Exchange | None, comm: CommContext) -> None:
        self._exchange = exchange
        self.comm = comm
        self.there: InFlight | None = None
        self.back: InFlight | None = None
        self.waited = False
        # On one rank what ``start`` was given is the token; what a deferred one will carry is not made yet.
        self.passes = exchange is not None and exchange.axis.size == 1

    @property
    def exchange(self) -> Exchange:
        """The exchange. Raises DistributedError before a deferred one has been launched."""
        if self._exchange is None:
            raise DistributedError("a deferred ticket was waited for before its launch")
        return self._exchange

    def claim(self) -> None:
        """Note the wait. Raises DistributedError the second time, and before a deferred launch."""
        exchange = self.exchange
        if self.waited:
            raise DistributedError(
                f"a ticket for {exchange.kind} over {exchange.axis.name} was waited for twice; what was launched "
                "before a recomputed unit arrives through Replay.arrival"
            )
        self.waited = True

    def arrive(self) -> Tensor:
        """Wait for the exchange and return its output."""
        flight, self.there = self.there, None
        assert flight is not None
        return self.comm.wait(flight)


def start(exchange: Exchange, x: Tensor, comm: CommContext) -> tuple[Tensor, Ticket]:
    """Launch ``exchange`` on ``x``. Returns (token, ticket) for ``wait``; ``x`` must not be written until then."""
    ticket = Ticket(exchange, comm)
    return (x if ticket.passes else _Start.apply(x, ticket)), ticket


def wait(token: Tensor, ticket: Ticket) -> Tensor:
    """Return the result of what ``start`` launched. Raises DistributedError the second time for a ticket."""
    ticket.claim()
    return token if ticket.passes else _Wait.apply(token, ticket)


def copy_gradient(y: Tensor) -> Tensor:
    """Return ``y``, the result of a ``wait``, whose gradient has other users, as after a sum: a copy travels."""
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
        ticket.there = ticket.comm.launch(ticket.exchange, x)
        return x.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ticket: Ticket = ctx.ticket
        if ticket.back is None:
            raise DistributedError(f"the gradient of {ticket.exchange.kind} was never sent: its wait had no backward")
        # Inside a recomputed unit this makes the unit run again, here, where the gradient is still in flight.
        _ = ctx.saved_tensors
        flight, ticket.back = ticket.back, None
        return ticket.comm.wait(flight), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, ticket: Ticket) -> Tensor:
        ctx.ticket = ticket
        return ticket.arrive()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ticket: Ticket = ctx.ticket
        ticket.back = ticket.comm.launch(ticket.exchange.conjugate(), grads[0])
        return grads[0].new_zeros(1), None


class MessageBuilder(Protocol):
    """Builds a message from tensors once its sizes are known, outside autograd."""

    def build(self, *inputs: Tensor) -> Tensor:
        """Make the rows [R, ..] of the message from the inputs of the node."""
        ...

    def gradients(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Make the inputs' gradients from that of the rows."""
        ...


class Deferred:
    """A message that is launched later than its place in the program. tickets: one per part."""

    def __init__(self, count: int, comm: CommContext) -> None:
        self.tickets = tuple(Ticket(None, comm) for _ in range(count))
        self._comm = comm
        self._inputs: tuple[Tensor, ...] = ()
        self._builder: MessageBuilder | None = None
        self._unsent: list[tuple[Ticket, Exchange, Tensor]] = []

    def launch(
        self,
        builder: MessageBuilder,
        exchanges: Sequence[Exchange],
        rows: Sequence[int],
        after: Event | None = None,
        *,
        first_only: bool = False,
    ) -> None:
        """Build the message and send its parts, each ``rows`` of it through one exchange, in order.

        after: the event after which the inputs are there; the launch then waits for nothing else, on the stream of
        the axis. first_only: the other parts go with ``send_next``. Raises DistributedError the second time.
        """
        if self._builder is not None:
            raise DistributedError("a deferred message was launched twice")
        self._builder, inputs, self._inputs = builder, self._inputs, ()
        comm, aside = self._comm, after is not None
        stream = comm.stream(exchanges[0].axis) if aside else None

        @torch.no_grad()
        def send() -> None:
            if aside:  # they may have no other owner, and this stream has yet to read them
                for x in inputs:
                    comm.device.adopt(x)
            parts = builder.build(*inputs).split(list(rows))
            self._unsent = list(zip(self.tickets, exchanges, parts, strict=True))
            while self._unsent:
                self.send_next(aside)
                if first_only:
                    break

        comm.device.launch(send, stream, after)

    def send_next(self, aside: bool = False) -> None:
        """Send the first part that has not been sent; nothing where all have been."""
        if self._unsent:
            ticket, exchange, part = self._unsent.pop(0)
            ticket._exchange = exchange
            ticket.there = self._comm.launch(exchange, part, aside)

    def take(self) -> tuple[Tensor | None, ...]:
        """Wait for the gradients of all parts and return those of the inputs."""
        flights = [ticket.back for ticket in self.tickets]
        if self._builder is None or any(flight is None for flight in flights):
            raise DistributedError("the gradient of a deferred message was never sent: its wait had no backward")
        for ticket in self.tickets:
            ticket.back = None
        grads = [self._comm.wait(flight) for flight in flights if flight is not None]
        return self._builder.gradients(grads[0] if len(grads) == 1 else torch.cat(grads))


def defer(inputs: Sequence[Tensor], count: int, comm: CommContext) -> tuple[tuple[Tensor, ...], Deferred]:
    """Return (``count`` tokens, the deferred message): the node of a message of ``count`` parts that is launched later.

    The inputs must not be written until all parts have been waited for.
    """
    deferred = Deferred(count, comm)
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
