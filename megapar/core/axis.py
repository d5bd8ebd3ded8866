"""One axis of the rank grid as a layer sees it."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megapar.core.journal import Journal

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megapar.core.meter import WaitMeter


class Ledger(Counter[tuple[str, str]]):
    """(axis, kind of collective) -> bytes that this rank sent. closed: nothing is added.

    meter: of the waits for collectives that are launched and waited for at once; None: nobody asks.
    """

    closed = False
    meter: WaitMeter | None = None

    def __init__(self) -> None:
        super().__init__()
        self.journal = Journal()

    def take(self) -> dict[str, int]:
        """ "axis/kind" -> bytes since the last call."""
        sent = {f"{axis}/{kind}": amount for (axis, kind), amount in sorted(self.items()) if amount}
        self.clear()
        return sent


@dataclass(frozen=True)
class Axis:
    """This rank's place on a mesh axis (or on several axes flattened into one).

    name: for messages. size: ranks along the axis. rank: this rank's coordinate, 0 <= rank < size.
    group: the process group; None exactly when size is 1, where nothing is communicated.
    ranks: the global ranks along the axis through this rank, in coordinate order. ledger: (axis, kind of collective)
    -> bytes that this rank sent; all axes of a world write into one. queue: of two ranks between which messages go one
    way, its name among the queues of the axis.
    """

    name: str
    size: int
    rank: int
    group: ProcessGroup | None
    ranks: tuple[int, ...]
    ledger: Ledger = field(default_factory=Ledger, compare=False, repr=False)
    queue: str = ""

    @property
    def communicator(self) -> str:
        """What the journal calls it."""
        return f"{self.name} {self.queue}" if self.queue else self.name

    def count(self, kind: str, sent_bytes: float) -> None:
        """Note what a collective sends from here."""
        self.note(kind)
        if not self.ledger.closed:
            self.ledger[self.name, kind] += round(sent_bytes)

    def note(self, kind: str) -> None:
        """A collective is about to be launched here."""
        self.ledger.journal.note(self.communicator, kind)

    def waiting(self, kind: str) -> AbstractContextManager[None]:
        """Around a collective over this axis that is launched and waited for at once."""
        meter = self.ledger.meter
        return nullcontext() if meter is None else meter.around(f"{self.name}/{kind}")

    @classmethod
    def single(cls, name: str, rank: int = 0) -> Axis:
        """An axis of size 1; ``rank`` is the global rank that stands on it."""
        return cls(name, 1, 0, None, (rank,))
