"""Keys and values of all ranks at once: one all-gather, and for the gradients one reduce-scatter.

The own tiles hide the all-gather, and in the backward both. Source: Llama 3, arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import AllGather, ReduceScatter
from megapar.core.comm.in_flight import CommContext
from megapar.core.context_parallel.blockwise import Columns, SeeColumns, SeeColumnsBackward, TilePlan
from megapar.core.context_parallel.positions import SequenceLayout
from megapar.core.context_parallel.tiles import Sight, gathered_tiles, halves, own_tiles


def gathered_plan(layout: SequenceLayout, rank: int, sight: Sight) -> TilePlan:
    """One arrival, of everything, in order of position."""
    own = own_tiles(layout, rank, sight)
    early, late = halves(own, len(layout.runs(sight.length, rank)[0]))
    return TilePlan(tuple(own), tuple(early), tuple(late), (tuple(gathered_tiles(layout, rank, sight)),))


@dataclass(frozen=True)
class Gathered:
    """All columns on every rank of cp, for as long as a layer attends to them; at least two ranks.

    axis: cp. layout: which rank holds which positions. comm: takes part in what is launched.
    """

    axis: Axis
    layout: SequenceLayout
    comm: CommContext

    def forward(self, own: Columns, plan: TilePlan, see: SeeColumns) -> None:
        """All-gather under the own tiles."""
        whole, mine = self._room(own)
        flight = self.comm.launch(AllGather(self.axis, into=whole), mine.message)
        see(plan.own, mine)
        see(plan.others[0], own.with_message(self._in_order(self.comm.wait(flight))))

    def backward(self, own: Columns, plan: TilePlan, see: SeeColumnsBackward) -> Columns:
        """All-gather under the early tiles, reduce-scatter under the late ones."""
        whole, mine = self._room(own)
        gradients = own.zeros()
        flight = self.comm.launch(AllGather(self.axis, into=whole), mine.message)
        see(plan.early, mine, gradients)
        columns = own.with_message(self._in_order(self.comm.wait(flight)))
        theirs = columns.zeros()
        see(plan.others[0], columns, theirs)
        flight = self.comm.launch(ReduceScatter(self.axis), self._by_rank(theirs.message))
        see(plan.late, mine, gradients)
        gradients.message.add_(self.comm.wait(flight))
        return gradients

    def _room(self, own: Columns) -> tuple[Tensor, Columns]:
        """Room for the columns of all ranks, and this rank's rows of it, filled."""
        length = own.message.shape[0]
        whole = own.message.new_empty((self.axis.size * length, *own.message.shape[1:]))
        mine = whole[self.axis.rank * length : (self.axis.rank + 1) * length]
        mine.copy_(own.message)
        return whole, own.with_message(mine)

    def _in_order(self, x: Tensor) -> Tensor:
        """From order of rank to order of position: first runs rise with the rank, second ones fall."""
        if not self.layout.zigzag:
            return x
        first, second = x.unflatten(0, (self.axis.size, 2, -1)).unbind(1)
        return torch.cat([first, second.flip(0)]).flatten(0, 1)

    def _by_rank(self, x: Tensor) -> Tensor:
        """Undo ``_in_order``."""
        if not self.layout.zigzag:
            return x
        first, second = x.unflatten(0, (2, self.axis.size, -1)).unbind(0)
        return torch.stack([first, second.flip(0)], dim=1).flatten(0, 2)
