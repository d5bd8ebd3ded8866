"""Asynchronous collectives with autograd: in flight while the program does other work, forward and backward.

    handle, ticket = start(exchange, x, comm)       launches
    ...                                             other work
    y = wait(handle, ticket)                        waits

    forward    start: launch                 wait: wait for it
    backward   wait: launch the conjugate    start: wait for it

The ticket represents the collective between the two calls. A buffer in flight must not be touched, so the ticket owns
it and is opaque on purpose: pytrees, hooks and casts cannot reach inside. The handle, one element that requires a
gradient, passes through autograd in the meantime and connects both halves in the graph. Autograd runs the newest ready
node first, so the backward order mirrors the program order. Inputs are kept alive until their collective has been
waited for.

Every rank of the axis must start the same exchanges in the same order, even if it has nothing to send. On an axis of
one rank nothing is launched and ``wait`` returns ``x``.

If the sizes of a message are computed on the device, building it at its place in the program would block the host.
``defer`` inserts its autograd node there, and ``Deferred.launch`` sends the message later. The graph then has the order
of the program, regardless of the order of the launches.

    handles, deferred = defer(inputs, count, comm)        inserts the node; ``count`` messages will be sent
    ...                                                   the sizes arrive
    deferred.launch(builder, exchanges, rows, after)      builds the message and launches its parts
    y = wait(handles[i], deferred.tickets[i])
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

    Attributes:
        forward_flight: The exchange while it is in flight, else None.
        backward_flight: Its conjugate while that is in flight, else None.
        passes: True on an axis of one rank, where nothing is launched and the handle is the input itself.
    """

    def __init__(self, exchange: Exchange | None, comm: CommContext) -> None:
        self._exchange = exchange
        self.comm = comm
        self.forward_flight: InFlight | None = None
        self.backward_flight: InFlight | None = None
        self.waited = False
        # A deferred message never passes, even on one rank: its rows do not exist yet when the handle is made.
        self.passes = exchange is not None and exchange.axis.size == 1

    @property
    def exchange(self) -> Exchange:
        """The exchange. Raises DistributedError if it is deferred and not launched yet."""
        if self._exchange is None:
            raise DistributedError("a deferred ticket was waited for before its launch")
        return self._exchange

    def claim(self) -> None:
        """Record the wait. Raises DistributedError the second time, and before a deferred launch."""
        exchange = self.exchange
        if self.waited:
            raise DistributedError(
                f"a ticket for {exchange.kind} over {exchange.axis.name} was waited for twice; wait through "
                "Replay.arrival for an exchange that was launched before a recomputed unit"
            )
        self.waited = True

    def arrive(self) -> Tensor:
        """Wait for the exchange and return its output."""
        flight, self.forward_flight = self.forward_flight, None
        assert flight is not None
        return self.comm.wait(flight)


def start(exchange: Exchange, x: Tensor, comm: CommContext) -> tuple[Tensor, Ticket]:
    """Launch ``exchange`` on ``x`` and return (handle, ticket) for ``wait``; ``x`` must not be written until then."""
    ticket = Ticket(exchange, comm)
    return (x if ticket.passes else _Start.apply(x, ticket)), ticket


def wait(handle: Tensor, ticket: Ticket) -> Tensor:
    """Wait for the exchange of ``start``; return its result. Raises DistributedError the second time for a ticket."""
    ticket.claim()
    return handle if ticket.passes else _Wait.apply(handle, ticket)


def copy_gradient(y: Tensor) -> Tensor:
    """Return ``y``, the result of a ``wait``, and copy its gradient before the backward launches it.

    For a gradient that has other users as well, such as that of a sum: a buffer in flight must not be shared.
    """
    return _CopyGradient.apply(y)


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
        ticket.forward_flight = ticket.comm.launch(ticket.exchange, x)
        return ticket.comm.zero(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ticket: Ticket = ctx.ticket
        if ticket.backward_flight is None:
            raise DistributedError(f"the gradient of {ticket.exchange.kind} was never sent: its wait had no backward")
        # Inside a recomputed unit this triggers the recomputation here, while the gradient is still in flight.
        _ = ctx.saved_tensors
        flight, ticket.backward_flight = ticket.backward_flight, None
        return ticket.comm.wait(flight), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Tensor, ticket: Ticket) -> Tensor:
        ctx.ticket, ctx.zero = ticket, handle.detach()
        return ticket.arrive()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ticket: Ticket = ctx.ticket
        ticket.backward_flight = ticket.comm.launch(ticket.exchange.conjugate(), grads[0])
        return ctx.zero, None


class MessageBuilder(Protocol):
    """Builder of a message from tensors once its sizes are known, outside autograd."""

    def build(self, *inputs: Tensor) -> Tensor:
        """Build the rows [R, ..] of the message from the inputs of the node."""

    def gradients(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the inputs from the gradient [R, ..] of the rows."""


class Deferred:
    """A message that is launched later than its place in the program."""

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
        """Build the message and send its parts in order, one exchange each. Raises DistributedError the second time.

        Args:
            after: Event after which the inputs are ready. The launch then waits for this event only, on the side
                stream of the axis.
            first_only: Send only the first part; ``send_next`` sends the others.
        """
        if self._builder is not None:
            raise DistributedError("a deferred message was launched twice")
        self._builder, inputs, self._inputs = builder, self._inputs, ()
        comm, side_stream = self._comm, after is not None
        stream = comm.stream(exchanges[0].axis) if side_stream else None

        @torch.no_grad()
        def send() -> None:
            if side_stream:  # The inputs may have no other owner, and this stream has yet to read them.
                for x in inputs:
                    comm.device.adopt(x)
            parts = builder.build(*inputs).split(list(rows))
            self._unsent = list(zip(self.tickets, exchanges, parts, strict=True))
            while self._unsent:
                self.send_next(side_stream)
                if first_only:
                    break

        comm.device.launch(send, stream, after)

    def send_next(self, side_stream: bool = False) -> None:
        """Send the next part. Does nothing if all parts have been sent."""
        if self._unsent:
            ticket, exchange, part = self._unsent.pop(0)
            ticket._exchange = exchange
            ticket.forward_flight = self._comm.launch(exchange, part, side_stream)

    def take(self) -> tuple[Tensor | None, ...]:
        """Wait for the gradients of all parts and return the gradients of the inputs."""
        flights = [ticket.backward_flight for ticket in self.tickets]
        if self._builder is None or any(flight is None for flight in flights):
            raise DistributedError("the gradient of a deferred message was never sent: its wait had no backward")
        for ticket in self.tickets:
            ticket.backward_flight = None
        grads = [self._comm.wait(flight) for flight in flights if flight is not None]
        return self._builder.gradients(grads[0] if len(grads) == 1 else torch.cat(grads))


def defer(inputs: Sequence[Tensor], count: int, comm: CommContext) -> tuple[tuple[Tensor, ...], Deferred]:
    """Insert the autograd node of a message of ``count`` parts that is launched later.

    The inputs must not be written until all parts have been waited for.

    Returns:
        (one handle for each part, the deferred message).
    """
    deferred = Deferred(count, comm)
    return _Defer.apply(deferred, *inputs), deferred


class _Defer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, deferred: Deferred, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.deferred = deferred
        deferred._inputs = tuple(x.detach() for x in inputs)
        return tuple(ticket.comm.zero(inputs[0]) for ticket in deferred.tickets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.deferred.take()
