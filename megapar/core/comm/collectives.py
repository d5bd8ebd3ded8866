"""Collectives over an axis of more than one rank. The bytes that they send are added to its ``sent_bytes``.

Bytes are those that one rank sends if nothing is sent twice, for n ranks and a whole message of w bytes:

    all_gather, reduce_scatter    w (n - 1) / n
    all_reduce                    2 w (n - 1) / n     a reduce-scatter and an all-gather
    all_to_all                    the rows for other ranks
    send                          the message

On a CPU the pieces are exchanged point to point, and receives are posted before sends. gloo's own collectives send
first: the receive is posted after the send on the same connection, the peer waits for it, and the two directions of a
link take turns (torch 2.13: twice the time of one direction).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core.comm.axis import Axis
from megapar.core.torch_names import all_gather_single, reduce_scatter_single


def all_gather(whole: Tensor, piece: Tensor, axis: Axis, *, async_op: bool = False) -> dist.Work | None:
    """Gather the pieces [n, ..] of all ranks into ``whole`` [size * n, ..], in rank order."""
    axis.count("all_gather", whole.nbytes * (axis.size - 1) / axis.size)
    if _by_pieces(axis):
        sent = piece.view(whole.shape[0] // axis.size, *whole.shape[1:])
        return _exchange(whole.chunk(axis.size), [sent] * axis.size, axis, async_op)
    return all_gather_single(whole, piece, group=axis.group, async_op=async_op)


def all_reduce(
    x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, async_op: bool = False
) -> dist.Work | None:
    """Reduce ``x`` over all ranks with ``op``, in place."""
    count_all_reduce(x, axis)
    return dist.all_reduce(x, op=op, group=axis.group, async_op=async_op)


def count_all_reduce(x: Tensor, axis: Axis) -> None:
    """Record an all-reduce of ``x`` that torch launches itself."""
    axis.count("all_reduce", 2 * x.nbytes * (axis.size - 1) / axis.size)


def count_all_gather(piece: Tensor, axis: Axis) -> None:
    """Record an all-gather of every rank's ``piece`` that torch launches itself."""
    axis.count("all_gather", piece.nbytes * (axis.size - 1))


def count_reduce_scatter(piece: Tensor, axis: Axis) -> None:
    """Record a reduce-scatter that gives every rank a ``piece`` and that torch launches itself."""
    axis.count("reduce_scatter", piece.nbytes * (axis.size - 1))


def all_to_all(
    received: Tensor,
    sent: Tensor,
    axis: Axis,
    receive: Sequence[int] | None = None,
    send: Sequence[int] | None = None,
    *,
    async_op: bool = False,
) -> dist.Work | None:
    """Send ``send[r]`` rows to rank r and receive ``receive[r]`` rows from it; even pieces if both are None."""
    rows = sent.shape[0] - (sent.shape[0] // axis.size if send is None else send[axis.rank])
    axis.count("all_to_all", rows * sent.nbytes / max(1, sent.shape[0]))
    if _by_pieces(axis):
        arriving = received.chunk(axis.size) if receive is None else received.split(list(receive))
        leaving = sent.chunk(axis.size) if send is None else sent.split(list(send))
        return _exchange(arriving, leaving, axis, async_op)
    splits = None if receive is None else list(receive), None if send is None else list(send)
    return dist.all_to_all_single(received, sent, *splits, group=axis.group, async_op=async_op)


def send_receive(received: Tensor, sent: Tensor, axis: Axis, to: int | None, source: int | None) -> dist.Work | None:
    """Send to rank ``to`` of the axis and receive from rank ``source``, asynchronously; None skips either."""
    calls = []
    if source is not None:  # The receive is posted first, for the reason given above.
        calls.append(dist.P2POp(dist.irecv, received, axis.ranks[source], group=axis.group))
    if to is not None:
        axis.count("send", sent.nbytes)
        calls.append(dist.P2POp(dist.isend, sent, axis.ranks[to], group=axis.group))
    return HostWork(partial(_wait_for_all, dist.batch_isend_irecv(calls))) if calls else None


def reduce_scatter(
    piece: Tensor, whole: Tensor, axis: Axis, *, async_op: bool = False, scratch: Tensor | None = None
) -> dist.Work | None:
    """Sum ``whole`` [size * n, ..] over the axis and write this rank's rows [n, ..] to ``piece``.

    gloo's reduce-scatter is an all-reduce of everything (torch 2.13), which sends twice the bytes. On a CPU, the ranks
    therefore exchange the pieces, in ``scratch`` (like ``whole``) if given, and each sums its own in rank order.
    """
    axis.count("reduce_scatter", whole.nbytes * (axis.size - 1) / axis.size)
    work: dist.Work | None
    if piece.device.type != "cpu":
        work = reduce_scatter_single(piece, whole, group=axis.group, async_op=async_op)
        return work
    received = (torch.empty_like(whole) if scratch is None else scratch).view(axis.size, *piece.shape)
    if _by_pieces(axis):
        exchange = _exchange(received, whole.view_as(received), axis, async_op)
    else:
        exchange = dist.all_to_all_single(received.view(whole.shape), whole, group=axis.group, async_op=async_op)

    def finish() -> None:
        """Wait for the pieces [size, n, ..], and sum them."""
        _wait_for_all([exchange])
        torch.sum(received, 0, out=piece)

    if exchange is not None:
        return HostWork(finish)
    finish()
    return None


def send(x: Tensor, axis: Axis, to: int) -> dist.Work:
    """Start to send ``x`` to the rank at coordinate ``to``. Do not change ``x`` before the work has been waited for."""
    axis.count("send", x.nbytes)
    work: dist.Work | None = dist.isend(x, axis.ranks[to], group=axis.group)
    assert work is not None
    return work


def receive(x: Tensor, axis: Axis, source: int) -> dist.Work:
    """Start to receive ``x`` from the rank at coordinate ``source``. Messages arrive in the order of their sends."""
    axis.note("receive")
    work: dist.Work | None = dist.irecv(x, axis.ranks[source], group=axis.group)
    assert work is not None
    return work


def _by_pieces(axis: Axis) -> bool:
    return dist.get_backend(axis.group) == dist.Backend.GLOO


def _exchange(
    received: Sequence[Tensor] | Tensor, sent: Sequence[Tensor] | Tensor, axis: Axis, async_op: bool
) -> dist.Work | None:
    """Send ``sent[r]`` to rank r and receive ``received[r]`` from it; copy this rank's own piece at once."""
    others = [(axis.rank + step) % axis.size for step in range(1, axis.size)]
    group = axis.group
    works = [dist.irecv(received[r], group=group, group_src=r) for r in reversed(others) if received[r].numel()]
    works += [dist.isend(sent[r], group=group, group_dst=r) for r in others if sent[r].numel()]
    received[axis.rank].copy_(sent[axis.rank])
    if async_op:
        return HostWork(partial(_wait_for_all, works))
    _wait_for_all(works)
    return None


class HostWork(dist.Work):
    """Work that the host completes in its first ``wait``, by ``finish``, which waits with the timeouts of its groups.

    Later waits do nothing: gloo would wait forever for a completed message.
    """

    def __init__(self, finish: Callable[[], object]) -> None:
        super().__init__()
        self._finish: Callable[[], object] | None = finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Complete the work, unless it is complete."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        """Return True once ``wait`` was called."""
        return self._finish is None


def _wait_for_all(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
