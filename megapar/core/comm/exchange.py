"""Collectives and their conjugates: the gradient of a collective is sent through its conjugate.

    forward                 backward              conjugate
    Copy                    all-reduce            Reduce
    Reduce (all-reduce)     nothing               Copy
    AllGather(alike)        own piece             OwnPiece (later computation is the same on every rank)
    AllGather               reduce-scatter        ReduceScatter (later computation differs per rank)
    ReduceScatter           all-gather            AllGather
    AllToAll                all-to-all            AllToAll, the splits swapped
    TwoHops                 the two hops back     TwoHops, ``core/comm/two_hops.py``
    SendReceive             send and receive      SendReceive, the two ranks swapped

The right all-gather depends on the use of its result. If all ranks compute the same from it, each already has the whole
gradient (``alike``). If each rank uses it for a part of the work, the parts of the gradient must be summed.

An exchange along dim 0 can be in flight (``launch``, called by ``async_pairs.py``). A ``BlockingExchange`` can also
block (``run``, called by ``autograd.py``), along any dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core.comm import collectives
from megapar.core.comm.axis import Axis


class Exchange(Protocol):
    """One collective over an axis, along dim 0."""

    @property
    def axis(self) -> Axis:
        """The axis whose ranks participate."""

    @property
    def kind(self) -> str:
        """Name in counts and error messages."""

    def launch(self, x: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Launch on contiguous ``x``. Return (output, work, None if nothing is sent); wait before reading output."""

    def conjugate(self) -> Exchange:
        """Return the exchange of the gradient."""


class BlockingExchange(Exchange, Protocol):
    """An exchange that can also block, along any dim. So can its conjugate."""

    def run(self, x: Tensor, dim: int) -> Tensor:
        """Run the exchange along ``dim`` and return the finished output. ``x`` may have any strides."""

    def conjugate(self) -> BlockingExchange:
        """Return the exchange of the gradient."""


class RowExchange(Exchange, Protocol):
    """An exchange of rows with every rank, by any way."""

    @property
    def send(self) -> tuple[int, ...] | None:
        """Number of rows to each rank that it sends to; None for even pieces."""

    @property
    def receive(self) -> tuple[int, ...] | None:
        """Number of rows from each rank that it receives from; None for even pieces."""

    def conjugate(self) -> RowExchange:
        """Return the exchange that sends every row back."""


@dataclass(frozen=True)
class AllToAll:
    """Rows to every rank and from every rank: [sum(send), ..] to [sum(receive), ..], in rank order.

    Attributes:
        send: Number of rows for each rank of the axis; None for even pieces.
        receive: Number of rows from each rank of the axis; None for even pieces.
    """

    axis: Axis
    send: tuple[int, ...] | None = None
    receive: tuple[int, ...] | None = None
    kind: str = "all_to_all"

    def launch(self, x: Tensor) -> tuple[Tensor, dist.Work | None]:
        rows = x.shape[0] if self.receive is None else sum(self.receive)
        y = x.new_empty((rows, *x.shape[1:]))
        return y, collectives.all_to_all(y, x, self.axis, self.receive, self.send, async_op=True)

    def conjugate(self) -> AllToAll:
        return AllToAll(self.axis, self.receive, self.send, self.kind)


@dataclass(frozen=True)
class AllGather:
    """The rows of all ranks, the same number from each: [n, ..] to [size * n, ..], in rank order.

    Attributes:
        into: Output tensor, of which ``x`` may be this rank's rows; allocated if None.
        alike: All ranks compute the same from the result, so that each has the whole gradient. The conjugate is then
            OwnPiece.
    """

    axis: Axis
    into: Tensor | None = field(default=None, compare=False)
    alike: bool = False
    kind: str = "all_gather"

    def launch(self, x: Tensor, *, async_op: bool = True) -> tuple[Tensor, dist.Work | None]:
        y = x.new_empty((self.axis.size * x.shape[0], *x.shape[1:])) if self.into is None else self.into
        return y, collectives.all_gather(y, x, self.axis, async_op=async_op)

    def run(self, x: Tensor, dim: int) -> Tensor:
        return _run(self, x, dim)

    def conjugate(self) -> ReduceScatter | OwnPiece:
        """Return ReduceScatter, which sums the gradients of the ranks' parts of the work, or OwnPiece if ``alike``."""
        return OwnPiece(self.axis) if self.alike else ReduceScatter(self.axis)


@dataclass(frozen=True)
class ReduceScatter:
    """This rank's even piece of the sum over all ranks: [size * n, ..] to [n, ..]."""

    axis: Axis
    into: Tensor | None = field(default=None, compare=False)
    kind: ClassVar[str] = "reduce_scatter"

    def launch(self, x: Tensor, *, async_op: bool = True) -> tuple[Tensor, dist.Work | None]:
        y = x.new_empty((x.shape[0] // self.axis.size, *x.shape[1:])) if self.into is None else self.into
        return y, collectives.reduce_scatter(y, x, self.axis, async_op=async_op)

    def run(self, x: Tensor, dim: int) -> Tensor:
        """Sum [.., size * n, ..] and scatter to [.., n, ..]. Raises ValueError if the axis does not divide the dim."""
        _check_even(x, self.axis, dim)
        return _run(self, x, dim)

    def conjugate(self) -> AllGather:
        """Return AllGather: every rank's input contributed to every piece of the sum."""
        return AllGather(self.axis)


@dataclass(frozen=True)
class OwnPiece:
    """This rank's even piece of a tensor that is the same on all ranks: [size * n, ..] to [n, ..]. Sends nothing."""

    axis: Axis
    kind: ClassVar[str] = "own_piece"

    def launch(self, x: Tensor) -> tuple[Tensor, dist.Work | None]:
        return self.run(x, 0), None

    def run(self, x: Tensor, dim: int) -> Tensor:
        """Cut [.., size * n, ..] to [.., n, ..]. Raises ValueError if the axis does not divide the dim."""
        return own_piece(x, self.axis, dim).contiguous()

    def conjugate(self) -> AllGather:
        """Return AllGather(alike): the gradients of the pieces make up that of the whole."""
        return AllGather(self.axis, alike=True)


@dataclass(frozen=True)
class Reduce:
    """The sum over all ranks, on each of them.

    Attributes:
        in_place: Write the sum to the input, which is otherwise unchanged.
    """

    axis: Axis
    in_place: bool = False
    kind: ClassVar[str] = "all_reduce"

    def launch(self, x: Tensor) -> tuple[Tensor, dist.Work | None]:
        y = x if self.in_place else x.clone()
        return y, collectives.all_reduce(y, self.axis, async_op=True)

    def run(self, x: Tensor, dim: int) -> Tensor:
        y = x if self.in_place else x.clone(memory_format=torch.contiguous_format)
        with self.axis.waiting(self.kind):
            collectives.all_reduce(y, self.axis)
        return y

    def conjugate(self) -> Copy:
        """Return Copy: computation after a sum is the same on every rank, and so is the gradient."""
        return Copy(self.axis)


@dataclass(frozen=True)
class Copy:
    """The input of computations that differ per rank, unchanged. Sends nothing."""

    axis: Axis
    kind: ClassVar[str] = "copy"

    def launch(self, x: Tensor) -> tuple[Tensor, dist.Work | None]:
        return x.detach(), None  # A separate tensor object: autograd attaches the graph to the result of ``wait``.

    def run(self, x: Tensor, dim: int) -> Tensor:
        return x.view_as(x)

    def conjugate(self) -> Reduce:
        return Reduce(self.axis)


@dataclass(frozen=True)
class SendReceive:
    """A message to one rank of the axis and one of the same shape from another.

    Attributes:
        to: Rank of the axis to send to; None to send nothing.
        source: Rank of the axis to receive from; None to receive nothing and return zeros.
    """

    axis: Axis
    to: int | None
    source: int | None
    kind: ClassVar[str] = "send"

    def launch(self, x: Tensor) -> tuple[Tensor, dist.Work | None]:
        y = torch.zeros_like(x) if self.source is None else torch.empty_like(x)
        return y, collectives.send_receive(y, x, self.axis, self.to, self.source)

    def conjugate(self) -> SendReceive:
        return SendReceive(self.axis, self.source, self.to)


@dataclass(frozen=True)
class Unsent:
    """An exchange that is skipped because its result is not needed: output and gradient are zeros."""

    exchange: RowExchange

    @property
    def axis(self) -> Axis:
        return self.exchange.axis

    @property
    def kind(self) -> str:
        return self.exchange.kind

    def launch(self, x: Tensor) -> tuple[Tensor, None]:
        rows = x.shape[0] if self.exchange.receive is None else sum(self.exchange.receive)
        return x.new_zeros((rows, *x.shape[1:])), None

    def conjugate(self) -> Unsent:
        return Unsent(self.exchange.conjugate())


def own_piece(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's even piece of ``x`` along ``dim``, as a view, without a conjugate for its gradient.

    Raises ValueError if the axis does not divide the dim.
    """
    _check_even(x, axis, dim)
    length = x.shape[dim] // axis.size
    return x.narrow(dim, axis.rank * length, length)


def _check_even(x: Tensor, axis: Axis, dim: int) -> None:
    if x.shape[dim] % axis.size:
        raise ValueError(f"dim {dim} of {tuple(x.shape)} is not divisible by the {axis.size} ranks of {axis.name}")


def _run(exchange: AllGather | ReduceScatter, x: Tensor, dim: int) -> Tensor:
    """Run an exchange along ``dim``, which is moved to the front for it."""
    front = x.movedim(dim, 0).contiguous()
    with exchange.axis.waiting(exchange.kind):
        y, _ = exchange.launch(front, async_op=False)
    return y.movedim(0, dim).contiguous()
