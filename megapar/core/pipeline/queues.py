"""The queues of a pipeline rank: point-to-point messages with its neighbours.

    stage 0   0>1 send  ->  stage 1   0>1 receive        one communicator per ordered pair, so that on each
              1>0 receive  <-         1>0 send           one rank only sends and the other only receives

An accelerator's communicator runs operations in launch order. On a shared communicator, a receive launched before a
send would delay the send until the receive's message arrives; and a receive launched from the compute stream would
first wait for the computations before it. ``simulate`` shows the cost of both. Therefore sends are launched after the
computation that produced them, and receives from a separate stream without computations, as soon as the host reaches
them; or behind the computations before them, if the device's class limits how far ahead they are (``lookahead``).

Receive kernels wait on the device while other kernels run. Every wait is for an action that is earlier in the programs,
and ``check`` proves that the programs end even if every rank performs one action at a time. So they cannot deadlock,
however few hardware queues the device has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch import Tensor

from megapar.core.comm import collectives
from megapar.core.comm.axis import Axis
from megapar.core.comm.meter import WaitMeter
from megapar.core.device.base import Device


class Queues:
    """This rank's ends of the queues to and from its neighbours.

    Args:
        axes: (sender, receiver) -> the axis of the two, the sender first.
    """

    def __init__(self, rank: int, axes: Mapping[tuple[int, int], Axis], device: Device) -> None:
        self.rank = rank
        self._axes = axes
        self._device = device
        self._stream = device.new_stream()
        self._before = device.event()

    def send(self, x: Tensor, to: int) -> dist.Work:
        """Send ``x`` after all computations launched so far.

        The caller must keep ``x`` alive and unchanged until it has waited for the returned work.
        """
        return collectives.send(x, self._axes[self.rank, to], 1)

    def receive(self, room: Callable[[], Tensor], source: int, *, early: bool = True) -> tuple[Tensor, dist.Work]:
        """Launch a receive; return (buffer, work) for ``finish_receive``.

        early: It waits for no computation; otherwise for those that are launched.

        ``room`` allocates the buffer, on the receive stream. On the compute stream, the allocator could return a block
        that computations have freed but still read, and only waiting for them would make that safe. On the receive
        stream, it returns blocks of earlier receives, and only after the stream that adopted them, in
        ``finish_receive``, has passed their release.
        """
        axis = self._axes[source, self.rank]

        def launch() -> tuple[Tensor, dist.Work]:
            buffer = room()
            return buffer, collectives.receive(buffer, axis, 0)

        # An event from when the queues were made: by default the receive stream would wait for the current stream.
        return self._device.launch(launch, self._stream, after=self._before if early else None)

    def finish_receive(self, buffer: Tensor, work: dist.Work, meter: WaitMeter | None = None) -> Tensor:
        """Return the buffer after making the current stream wait for its message."""
        if meter is None:
            work.wait()
        else:
            meter.wait(work, "pp/receive")
        self._device.adopt(buffer)
        return buffer
