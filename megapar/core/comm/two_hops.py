"""Two all-to-alls, one after the other, as one exchange: to another node once, and from there to the node's ranks.

    there   first hop between nodes    relay: a row for each rank    second hop within the node
    back    first hop within the node  relay: sums of the rows       second hop between nodes

On an accelerator all three run on the axis' own stream, and the host continues. On a CPU the host relays. It does so
where the message between nodes, the slow one, stays in flight as long as that of a plain all-to-all would: right after
the launch if the first hop is within the node, and in the wait if it is between nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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
        second: The second hop; its ``receive`` must not be None.
        relay: Makes the rows of the second hop from those of the first.
        back: Makes, for the way back, the first hop's rows from those of the second.
        slow: Name of the axis between nodes. If its hop is first and the host relays, it is in flight until the wait.
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
        return self.first.kind

    @property
    def send(self) -> tuple[int, ...] | None:
        return self.first.send

    @property
    def receive(self) -> tuple[int, ...] | None:
        return self.second.receive

    def launch(self, x: Tensor) -> tuple[Tensor, dist.Work | None]:
        arriving, work = _launch(self.first, x)
        if work is not None and self.first.axis.name == self.slow and not self.device.is_async:
            y = x.new_empty((sum(self.receive or ()), *x.shape[1:]))
            return y, collectives.HostWork(partial(self._relay_to, y, arriving, work))
        if work is not None:
            with self.first.axis.waiting(self.kind):
                work.wait()
        rows = self.relay(arriving)
        y, work = _launch(self.second, rows)
        return y, None if work is None else collectives.HostWork(partial(self._wait_keeping, work, rows))

    def _relay_to(self, y: Tensor, arriving: Tensor, first: dist.Work) -> None:
        """Wait for the first hop, relay its rows, and take the second hop, to ``y``."""
        first.wait()
        rows, hop = self.relay(arriving), self.second
        if hop.axis.size == 1:
            y.copy_(rows)
        else:
            collectives.all_to_all(y, rows, hop.axis, hop.receive, hop.send)

    def _wait_keeping(self, second: dist.Work, rows: Tensor) -> None:
        """Wait for the second hop, whose input is kept until then."""
        second.wait()
        self.device.adopt(rows)  # The stream that made them has not waited for the hop.

    def conjugate(self) -> TwoHops:
        first, second = self.second.conjugate(), self.first.conjugate()
        return TwoHops(self.axis, first, second, self.back, self.relay, self.slow, self.device)


def _launch(hop: AllToAll, x: Tensor) -> tuple[Tensor, dist.Work | None]:
    return (x, None) if hop.axis.size == 1 else hop.launch(x)
