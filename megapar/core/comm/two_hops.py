"""Two all-to-alls, one after the other, as one exchange: to another node once, and from there to the node's ranks.

    there   first hop between nodes    relay: a row for each rank    second hop within the node
    back    first hop within the node  relay: sums of the rows       second hop between nodes

On an accelerator all three run on the axis' own stream, and the host goes on. On a CPU the host relays. It does so
where the message between nodes, the slow one, stays in flight as long as that of a plain all-to-all would: right after
the launch if the first hop is within the node, and in the wait if it is between nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from megapar.core.comm import collectives
from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import AllToAll
from megapar.core.device.base import Device

Relay = Callable[[Tensor], Tensor]  # rows that arrived by the first hop -> rows of the same width for the second


@dataclass(frozen=True)
class TwoHops:
    """Rows over one axis, relayed, and sent on over another. Conjugate: the way back.

    Attributes:
        axis: The axis that the two make up.
        first: The first hop.
        second: The second hop; its ``receive`` is given.
        relay: Makes the rows of the second hop from those of the first.
        back: Makes, for the way back, the first hop's rows from those of the second.
        slow: Name of the axis whose hop stays in flight until the wait if it is the first one, where the host relays.
        device: The device of the rows.
    """

    axis: Axis
    first: AllToAll
    second: AllToAll
    relay: Relay
    back: Relay
    slow: str
    device: Device

    @property
    def kind(self) -> str:
        """Name in counts and error messages."""
        return self.first.kind

    @property
    def send(self) -> tuple[int, ...] | None:
        """Rows sent by the first hop to each rank of its axis."""
        return self.first.send

    @property
    def receive(self) -> tuple[int, ...] | None:
        """Rows received by the second hop from each rank of its axis."""
        return self.second.receive

    def launch(self, x: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Exchange [sum(send), ..] to [sum(receive), ..]."""
        arriving, work = _launch(self.first, x)
        if work is not None and self.first.axis.name == self.slow and not self.device.is_async:
            y = x.new_empty((sum(self.receive or ()), *x.shape[1:]))
            return y, _RelayWork(self, work, arriving, y)
        if work is not None:
            with self.first.axis.waiting(self.kind):
                work.wait()
        rows = self.relay(arriving)
        y, work = _launch(self.second, rows)
        return y, None if work is None else _KeepingWork(work, rows, self.device)

    def conjugate(self) -> TwoHops:
        """Return the exchange that sends the rows back."""
        there, here = self.second.conjugate(), self.first.conjugate()
        return TwoHops(self.axis, there, here, self.back, self.relay, self.slow, self.device)


def _launch(hop: AllToAll, x: Tensor) -> tuple[Tensor, dist.Work | None]:
    return (x, None) if hop.axis.size == 1 else hop.launch(x)


class _KeepingWork(dist.Work):
    """A hop in flight, whose input is kept until it has been waited for."""

    def __init__(self, work: dist.Work, rows: Tensor, device: Device) -> None:
        super().__init__()
        self._work, self._device = work, device
        self._rows: Tensor | None = rows

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the hop."""
        self._work.wait() if timeout == timedelta(0) else self._work.wait(timeout)
        if self._rows is not None:
            self._device.adopt(self._rows)  # The stream that made them has not waited for the hop.
        self._rows = None
        return True

    def is_completed(self) -> bool:
        """Return True once ``wait`` has returned."""
        return self._rows is None


class _RelayWork(dist.Work):
    """A first hop in flight; the first ``wait`` relays its rows and takes the second hop, to ``y``."""

    def __init__(self, exchange: TwoHops, work: dist.Work, arriving: Tensor, y: Tensor) -> None:
        super().__init__()
        self._exchange, self._work, self._y = exchange, work, y
        self._arriving: Tensor | None = arriving

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the first hop, relay its rows, and wait for the second hop. The second call does nothing."""
        if self._arriving is None:
            return True
        self._work.wait() if timeout == timedelta(0) else self._work.wait(timeout)
        arriving, self._arriving = self._arriving, None
        rows, hop = self._exchange.relay(arriving), self._exchange.second
        if hop.axis.size == 1:
            self._y.copy_(rows)
        else:
            collectives.all_to_all(self._y, rows, hop.axis, hop.receive, hop.send)
        return True

    def is_completed(self) -> bool:
        """Return True once ``wait`` has returned."""
        return self._arriving is None
