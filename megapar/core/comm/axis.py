"""One axis of the device mesh, as a layer sees it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megapar.core.comm.accounts import CommBytes, FlightRecorder, WaitMeter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Axis:
    """This rank's place on a mesh axis, or on several axes flattened into one.

    Attributes:
        size: Number of ranks along the axis.
        rank: This rank's coordinate, 0 <= rank < size.
        group: The process group; None if and only if ``size`` is 1, where nothing is communicated.
        ranks: Global ranks along the axis through this rank, in coordinate order.
        sent_bytes: Bytes that this rank has sent. All axes of a world share this and the next two.
        meter: Time that this rank waited for blocking collectives.
        recorder: The last collectives that this rank launched.
        queue: For a one-way queue between two ranks, its name among the queues of the axis; else "".
        nodes: The axis divided by node, if messages over it go to a node once (``World.make_nodes``); else None.
    """

    name: str
    size: int
    rank: int
    group: ProcessGroup | None
    ranks: tuple[int, ...]
    sent_bytes: CommBytes = field(default_factory=CommBytes, compare=False, repr=False)
    meter: WaitMeter = field(default_factory=WaitMeter, compare=False, repr=False)
    recorder: FlightRecorder = field(default_factory=FlightRecorder, compare=False, repr=False)
    queue: str = ""
    nodes: AxisNodes | None = None

    @property
    def communicator(self) -> str:
        """Name of the axis, or of its queue, in the flight recorder."""
        return f"{self.name} {self.queue}" if self.queue else self.name

    def count(self, kind: str, sent_bytes: float) -> None:
        """Record that a collective is about to be launched on this axis, and count the bytes that this rank sends."""
        self.note(kind)
        self.sent_bytes.add(self.name, kind, sent_bytes)

    def note(self, kind: str) -> None:
        """Record that a collective is about to be launched on this axis."""
        self.recorder.note(self.communicator, kind)

    def waiting(self, kind: str) -> AbstractContextManager[None]:
        """Return a context that measures the wait for a blocking collective over this axis inside."""
        return self.meter.around(f"{self.name}/{kind}")

    @classmethod
    def single(cls, name: str) -> Axis:
        """Create an axis of one rank, global rank 0."""
        return cls(name, 1, 0, None, (0,))


@dataclass(frozen=True)
class AxisNodes:
    """An axis divided by node: rank r of the axis is at place r % within.size of node r // within.size.

    Attributes:
        between: The ranks at this rank's place, one of each node.
        within: The ranks of this rank's node.
    """

    between: Axis
    within: Axis
