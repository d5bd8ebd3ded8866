"""The queues of a pipeline rank: what it sends to its neighbours and receives from them.

    stage 0   0>1 send  ->  stage 1   0>1 receive        one communicator for each ordered pair, so that
              1>0 receive  <-         1>0 send           on each a rank does nothing but send, or nothing but receive

A communicator of an accelerator runs what it was given in the order of its launch. A receipt that stands before a send
would hold it up until its own message comes, and one launched from the stream of the computations would first wait for
those: ``simulate`` has what both cost. So sends are launched behind the computation that made them, and receipts from
a stream on which nothing is computed, as soon as the host comes to them.

Kernels of receipts wait on the device, while others run. All waits go back to actions that stand earlier in the
programs, which ``check`` proves to end even if every rank did one action after the other: so however few hardware
queues there are, nothing waits in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch import Tensor

from megapar.core.comm import collectives as transport
from megapar.core.comm.axis import Axis
from megapar.core.comm.meter import WaitMeter
from megapar.core.device.base import Device


class Queues:
    """Both ends of this rank's queues.

    rank: of the pipeline. axes: (sender, receiver) -> the two of them, the sender first. device: what launches.
    """

    def __init__(self, rank: int, axes: Mapping[tuple[int, int], Axis], device: Device) -> None:
        self.rank = rank
        self._axes = axes
        self._device = device
        self._stream = device.new_stream()
        self._before = device.event()

    def send(self, x: Tensor, to: int) -> dist.Work:
        """Launch ``x`` behind what was computed so far; it must live and stay as it is until that was waited for."""
        return transport.send(x, self._axes[self.rank, to], 1)

    def receive(self, room: Callable[[], Tensor], source: int) -> tuple[Tensor, dist.Work]:
        """Launch a receipt behind no computation: (the buffer that ``room`` makes, what ``land`` waits for).

        The buffer is made on the stream of receipts. Made on the stream of the computations it could be memory that
        these have freed and still read, which only a wait for them would rule out; on its own stream the allocator
        gives out what earlier receipts were in, and not before the stream that adopted them (``land``) has come past
        their release.
        """
        axis = self._axes[source, self.rank]

        def launch() -> tuple[Tensor, dist.Work]:
            buffer = room()
            return buffer, transport.receive(buffer, axis, 0)

        # An event of the time when the queues were made: without one the stream would wait for the current one.
        return self._device.launch(launch, self._stream, after=self._before)

    def land(self, buffer: Tensor, work: dist.Work, meter: WaitMeter | None = None) -> Tensor:
        """The buffer, once its message is there, for the current stream."""
        if meter is None:
            work.wait()
        else:
            meter.wait(work, "pp/receive")
        self._device.adopt(buffer)
        return buffer
