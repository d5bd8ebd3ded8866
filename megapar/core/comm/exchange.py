"""Collectives and their conjugates: the gradient of each goes through its conjugate.

    forward                 backward              conjugate
    Copy                    all-reduce            Reduce
    Reduce (all-reduce)     nothing               Copy
    AllGather(alike)        own piece             OwnPiece (what follows is the same on every rank)
    AllGather               reduce-scatter        ReduceScatter (what follows differs per rank)
    ReduceScatter           all-gather            AllGather
    AllToAll                all-to-all            AllToAll, the splits swapped
    SendReceive             the way back          SendReceive, the two ranks swapped

Which all-gather is right depends on what the ranks do with the result: where all compute the same from it, each already
holds the whole gradient (``alike``); where each uses it for a part of the work, the parts must be summed.

An exchange can be in flight (``launch``, by ``async_pairs.py``), along dim 0. A ``Conjugate`` can also be run at once
(``run``, by ``core/comm/autograd.py``), along any dim: it is then launched and waited for in one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core.comm import collectives as transport
from megapar.core.comm.axis import Axis


class Exchange(Protocol):
    """One collective over an axis, along dim 0."""

    @property
    def axis(self) -> Axis:
        """The axis whose ranks take part."""
        ...

    @property
    def kind(self) -> str:
        """Its name in counts and error messages."""
        ...

    def launch(self, x: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Return the output, not there yet, and what to wait for; None where nothing travels. ``x`` is contiguous."""
        ...

    def conjugate(self) -> Exchange:
        """Return what the gradient goes through."""
        ...


class Conjugate(Exchange, Protocol):
    """An exchange that can also be run at once, along any dim, and so can its conjugate."""

    def run(self, x: Tensor, dim: int) -> Tensor:
        """Return the output, which is there; ``x`` may have any strides."""
        ...

    def conjugate(self) -> Conjugate:
        """Return what the gradient goes through."""
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
        """Return the way back."""
        return AllToAll(self.axis, self.receive, self.send, self.kind)


@dataclass(frozen=True)
class AllGather:
    """The rows of all ranks, the same number from each. Conjugate: ReduceScatter.

    into: where they go; then ``x`` may be this rank's rows of it. None: a new tensor. alike: what follows is the same
    on every rank, and so is the gradient: the conjugate is OwnPiece.
    """

    axis: Axis
    into: Tensor | None = field(default=None, compare=False)
    alike: bool = False
    kind: ClassVar[str] = "all_gather"

    def launch(self, x: Tensor, *, async_op: bool = True) -> tuple[Tensor, dist.Work | None]:
        """[n, ..] to [size * n, ..]."""
        y = x.new_empty((self.axis.size * x.shape[0], *x.shape[1:])) if self.into is None else self.into
        return y, transport.all_gather(y, x, self.axis, async_op=async_op)

    def run(self, x: Tensor, dim: int) -> Tensor:
        """[.., n, ..] to [.., size * n, ..], in rank order."""
        return _run(self, x, dim)

    def conjugate(self) -> ReduceScatter | OwnPiece:
        """Return ReduceScatter: every rank used the rows for a part of the work, and the parts are summed."""
        return OwnPiece(self.axis) if self.alike else ReduceScatter(self.axis)


@dataclass(frozen=True)
class ReduceScatter:
    """This rank's even piece of the sum over all ranks. Conjugate: AllGather.

    into: where it goes. None: a new tensor.
    """

    axis: Axis
    into: Tensor | None = field(default=None, compare=False)
    kind: ClassVar[str] = "reduce_scatter"

    def launch(self, x: Tensor, *, async_op: bool = True) -> tuple[Tensor, dist.Work | None]:
        """[size * n, ..] to [n, ..]."""
        y = x.new_empty((x.shape[0] // self.axis.size, *x.shape[1:])) if self.into is None else self.into
        return y, transport.reduce_scatter(y, x, self.axis, async_op=async_op)

    def run(self, x: Tensor, dim: int) -> Tensor:
        """[.., size * n, ..] to [.., n, ..]. Raises ValueError where the axis does not divide the dim."""
        _check_even(x, self.axis, dim)
        return _run(self, x, dim)

    def conjugate(self) -> AllGather:
        """Return AllGather: each rank's rows reached what all ranks computed."""
        return AllGather(self.axis)


@dataclass(frozen=True)
class OwnPiece:
    """This rank's even piece of what all ranks hold alike: nothing travels. Conjugate: AllGather(alike)."""

    axis: Axis
    kind: ClassVar[str] = "own_piece"

    def launch(self, x: Tensor) -> tuple[Tensor, dist.Work | None]:
        """[size * n, ..] to [n, ..]."""
        return self.run(x, 0), None

    def run(self, x: Tensor, dim: int) -> Tensor:
        """[.., size * n, ..] to [.., n, ..]. Raises ValueError where the axis does not divide the dim."""
        return own_piece(x, self.axis, dim).contiguous()

    def conjugate(self) -> AllGather:
        """Return AllGather: the pieces' gradients are those of the whole."""
        return AllGather(self.axis, alike=True)


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

    def run(self, x: Tensor, dim: int) -> Tensor:
        """[..] to [..], whatever the dim."""
        y = x if self.in_place else x.clone(memory_format=torch.contiguous_format)
        with self.axis.waiting(self.kind):
            transport.all_reduce(y, self.axis)
        return y

    def conjugate(self) -> Copy:
        """Return Copy: what follows a sum is the same on every rank, and so is the gradient."""
        return Copy(self.axis)


@dataclass(frozen=True)
class Copy:
    """The input of parts that differ per rank: nothing travels. Conjugate: Reduce."""

    axis: Axis
    kind: ClassVar[str] = "copy"

    def launch(self, x: Tensor) -> tuple[Tensor, dist.Work | None]:
        """[n, ..] as it is."""
        return x.detach(), None  # another tensor object: autograd writes the graph onto what ``wait`` returns

    def run(self, x: Tensor, dim: int) -> Tensor:
        """[..] as it is, whatever the dim."""
        return x.view_as(x)

    def conjugate(self) -> Reduce:
        """Return Reduce: the parts' gradients are summed."""
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
        """Return the way back: the gradient goes to where the message came from."""
        return SendReceive(self.axis, self.source, self.to)


@dataclass(frozen=True)
class Unsent:
    """An exchange whose result is not needed: nothing travels, the output is zeros, and so is the gradient."""

    exchange: AllToAll

    @property
    def axis(self) -> Axis:
        """The axis of the exchange that is left out."""
        return self.exchange.axis

    @property
    def kind(self) -> str:
        """The kind of the exchange that is left out."""
        return self.exchange.kind

    def launch(self, x: Tensor) -> tuple[Tensor, None]:
        """[sum(send), ..] to zeros [sum(receive), ..]."""
        rows = x.shape[0] if self.exchange.receive is None else sum(self.exchange.receive)
        return x.new_zeros((rows, *x.shape[1:])), None

    def conjugate(self) -> Unsent:
        """Return the way back, also left out."""
        return Unsent(self.exchange.conjugate())


def own_piece(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's even piece of ``x`` along ``dim``, as a view; outside autograd's pairs.

    Raises ValueError where the axis does not divide the dim.
    """
    _check_even(x, axis, dim)
    length = x.shape[dim] // axis.size
    return x.narrow(dim, axis.rank * length, length)


def _check_even(x: Tensor, axis: Axis, dim: int) -> None:
    if x.shape[dim] % axis.size:
        raise ValueError(f"dim {dim} of {tuple(x.shape)} is not divisible by the {axis.size} ranks of {axis.name}")


def _run(exchange: AllGather | ReduceScatter, x: Tensor, dim: int) -> Tensor:
    """Run an exchange along ``dim``, which is moved to the front and back."""
    front = x.movedim(dim, 0).contiguous()
    with exchange.axis.waiting(exchange.kind):
        y, _ = exchange.launch(front, async_op=False)
    return y.movedim(0, dim).contiguous()
