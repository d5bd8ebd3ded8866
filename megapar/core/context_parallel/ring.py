"""Ring attention: each rank forwards the block that has just arrived while it computes with it.

    cp 4, rank 0        local        block of 3      block of 2      block of 1
    kv in flight       3 -> 0          2 -> 0          1 -> 0
    backward            first local  block of 3      block of 2      block of 1      last local
    dkv in flight                                  3's to rank 1    2's to rank 1    1's to rank 1, rank 0's from rank 3

The gradients of a block follow it around the ring and return while the rank of its columns computes its last local
tiles.
Source: Ring Attention, arXiv 2310.01889; the order of the backward, which hides every message, is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megapar.core.attention_mask import AttentionMask
from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import SendReceive
from megapar.core.comm.in_flight import CommContext, InFlight
from megapar.core.context_parallel.blockwise import Compute, ComputeBackward, TilePlan
from megapar.core.context_parallel.columns import Columns
from megapar.core.context_parallel.positions import SequenceLayout
from megapar.core.context_parallel.tiles import tiles_between


def ring_plan(layout: SequenceLayout, rank: int, mask: AttentionMask) -> TilePlan:
    """Plan one arrival per remote block: from the ranks before this one, nearest first."""
    sources = [(rank - step) % layout.size for step in range(1, layout.size)]
    return TilePlan.of(layout, rank, mask, [tiles_between(layout, rank, source, mask) for source in sources])


@dataclass(frozen=True)
class Ring:
    """A transport that passes blocks around a ring of two or more ranks of cp."""

    axis: Axis
    comm: CommContext

    def forward(self, local: Columns, plan: TilePlan, compute: Compute) -> None:
        """Compute one block per step while the next one is in flight."""
        flight = pass_on(self.axis, self.comm, local.message)
        compute(plan.local_tiles, local)
        for step, tiles in enumerate(plan.remote_tiles, start=1):
            columns = local.with_message(self.comm.wait(flight))
            if step < len(plan.remote_tiles):
                flight = pass_on(self.axis, self.comm, columns.message)
            compute(tiles, columns)

    def backward(self, local: Columns, plan: TilePlan, compute: ComputeBackward) -> Columns:
        """Go around the ring again; the gradients of each block follow it one step later."""
        flight, gradients = pass_on(self.axis, self.comm, local.message), local.zeros()
        returning: InFlight | None = None
        compute(plan.first_local_tiles, local, gradients)
        for step, tiles in enumerate(plan.remote_tiles, start=1):
            columns = local.with_message(self.comm.wait(flight))
            if step < len(plan.remote_tiles):
                flight = pass_on(self.axis, self.comm, columns.message)
            remote_gradients = columns.zeros()
            compute(tiles, columns, remote_gradients)
            if returning is not None:
                remote_gradients.message.add_(self.comm.wait(returning))
            returning = pass_on(self.axis, self.comm, remote_gradients.message)
        compute(plan.last_local_tiles, local, gradients)
        assert returning is not None
        gradients.message.add_(self.comm.wait(returning))
        return gradients


def pass_on(axis: Axis, comm: CommContext, message: Tensor) -> InFlight:
    """Send a message to the next rank of the ring, and receive that of the rank before."""
    size, rank = axis.size, axis.rank
    return comm.launch(SendReceive(axis, (rank + 1) % size, (rank - 1) % size), message)
