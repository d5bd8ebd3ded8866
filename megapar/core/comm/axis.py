"""One axis of the rank grid, as a layer sees it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megapar.core.comm.comm_bytes import CommBytes
from megapar.core.comm.flight_recorder import FlightRecorder
from megapar.core.comm.meter import WaitMeter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Axis:
    """This rank's place on a mesh axis (or on several axes flattened into one).

    name: of the axis, also in error messages. size: ranks along the axis. rank: this rank's coordinate, 0 <= rank <
    size. group: the process group; None exactly when size is 1, where nothing is communicated. ranks: the global ranks
    along the axis through this rank, in coordinate order. queue: of two ranks between which messages go one way, its
    name among the queues of the axis.

    The accounts of a world, which all of its axes share: sent_bytes: what this rank has sent. meter: the time that this
    rank waited for collectives that were launched and waited for at once. recorder: the last collectives launched.
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

    @property
    def communicator(self) -> str:
        """Its name in the flight recorder."""
        return f"{self.name} {self.queue}" if self.queue else self.name

    def count(self, kind: str, sent_bytes: float) -> None:
        """Note that a collective is about to be launched here, and count what this rank sends in it."""
        self.note(kind)
        self.sent_bytes.add(self.name, kind, sent_bytes)

    def note(self, kind: str) -> None:
        """Note that a collective is about to be launched here."""
        self.recorder.note(self.communicator, kind)

    def waiting(self, kind: str) -> AbstractContextManager[None]:
        """Measure the wait for a collective over this axis that is launched and waited for inside."""
        return self.meter.around(f"{self.name}/{kind}")

    @classmethod
    def single(cls, name: str, rank: int = 0) -> Axis:
        """Make an axis of size 1; ``rank`` is its global rank."""
        return cls(name, 1, 0, None, (rank,))
