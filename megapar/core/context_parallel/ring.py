"""Ring attention: each rank forwards the block that has just arrived while it computes with it.

    cp 4, rank 0        own      block of 3      block of 2      block of 1
    kv in flight       3 -> 0      2 -> 0          1 -> 0
    backward            early    block of 3      block of 2      block of 1      late
    dkv in flight                              3's to rank 1    2's to rank 1    1's to rank 1, own from rank 3

The gradients of a block follow it around the ring and return while their owner computes its late own tiles.
Source: Ring Attention, arXiv 2310.01889; the order of the backward, which hides every message, is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from megapar.core.attention_mask import AttentionMask
from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import SendReceive
from megapar.core.comm.in_flight import CommContext, InFlight
from megapar.core.context_parallel.blockwise import SeeColumns, SeeColumnsBackward, TilePlan
from megapar.core.context_parallel.columns import Columns
from megapar.core.context_parallel.positions import SequenceLayout
from megapar.core.context_parallel.tiles import halves, own_tiles, tiles_between


def ring_plan(layout: SequenceLayout, rank: int, mask: AttentionMask) -> TilePlan:
    """Plan one arrival per remote block: from the ranks before this one, nearest first."""
    own = own_tiles(layout, rank, mask)
    sources = [(rank - step) % layout.size for step in range(1, layout.size)]
    others = (tuple(tiles_between(layout, rank, source, mask)) for source in sources)
    early, late = halves(own, len(layout.runs(mask.length, rank)[0]))
    return TilePlan(tuple(own), tuple(early), tuple(late), tuple(others))


@dataclass(frozen=True)
class Ring:
    """A transport that passes blocks around a ring.

    Attributes:
        axis: cp, at least two ranks.
        comm: Launches the messages and tracks those in flight.
    """

    axis: Axis
    comm: CommContext

    def forward(self, own: Columns, plan: TilePlan, see: SeeColumns) -> None:
        """Compute one block per step while the next one is in flight."""
        flight = self._pass_on(own)
        see(plan.own, own)
        for step, tiles in enumerate(plan.others, start=1):
            columns = own.with_message(self.comm.wait(flight))
            if step < len(plan.others):
                flight = self._pass_on(columns)
            see(tiles, columns)

    def backward(self, own: Columns, plan: TilePlan, see: SeeColumnsBackward) -> Columns:
        """Go around the ring again; the gradients of each block follow it one step later."""
        flight, gradients = self._pass_on(own), own.zeros()
        returning: InFlight | None = None
        see(plan.early, own, gradients)
        for step, tiles in enumerate(plan.others, start=1):
            columns = own.with_message(self.comm.wait(flight))
            if step < len(plan.others):
                flight = self._pass_on(columns)
            remote_gradients = columns.zeros()
            see(tiles, columns, remote_gradients)
            if returning is not None:
                remote_gradients.message.add_(self.comm.wait(returning))
            returning = self._pass_on(remote_gradients)
        see(plan.late, own, gradients)
        assert returning is not None
        gradients.message.add_(self.comm.wait(returning))
        return gradients

    def _pass_on(self, columns: Columns) -> InFlight:
        size, rank = self.axis.size, self.axis.rank
        return self.comm.launch(SendReceive(self.axis, (rank + 1) % size, (rank - 1) % size), columns.message)
