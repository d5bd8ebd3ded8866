"""The collectives that can be in flight: each launches itself and knows what its gradient goes through."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core import transport
from megapar.core.axis import Axis


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
