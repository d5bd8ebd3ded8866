"""Keys and values of all ranks at once: one all-gather, and one reduce-scatter for the gradients.

Computing the local tiles hides the all-gather, and in the backward both messages.
Source: Llama 3, arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megapar.core.attention_mask import AttentionMask
from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import AllGather, ReduceScatter
from megapar.core.comm.in_flight import CommContext
from megapar.core.context_parallel.blockwise import Compute, ComputeBackward, TilePlan
from megapar.core.context_parallel.columns import Columns
from megapar.core.context_parallel.positions import SequenceLayout
from megapar.core.context_parallel.tiles import cut_columns, gathered_tiles


def gathered_plan(layout: SequenceLayout, rank: int, mask: AttentionMask, *, most: int | None) -> TilePlan:
    """Plan one arrival of all remote columns, in order of position. most: maximum columns of a tile; None for any."""
    remote = gathered_tiles(layout, rank, mask)
    return TilePlan.of(layout, rank, mask, [remote if most is None else cut_columns(remote, most)])


@dataclass(frozen=True)
class Gathered:
    """A transport that keeps all columns on each of two or more ranks of cp while a layer attends to them."""

    axis: Axis
    layout: SequenceLayout
    comm: CommContext

    def forward(self, local: Columns, plan: TilePlan, compute: Compute) -> None:
        """Overlap the all-gather with the local tiles."""
        whole, mine = self._gather_buffer(local)
        flight = self.comm.launch(AllGather(self.axis, into=whole), mine.message)
        compute(plan.local_tiles, mine)
        compute(plan.remote_tiles[0], local.with_message(self._in_order(self.comm.wait(flight))))

    def backward(self, local: Columns, plan: TilePlan, compute: ComputeBackward) -> Columns:
        """Overlap the all-gather with the first local tiles and the reduce-scatter with the last ones."""
        whole, mine = self._gather_buffer(local)
        gradients = local.zeros()
        flight = self.comm.launch(AllGather(self.axis, into=whole), mine.message)
        compute(plan.first_local_tiles, mine, gradients)
        columns = local.with_message(self._in_order(self.comm.wait(flight)))
        remote_gradients = columns.zeros()
        compute(plan.remote_tiles[0], columns, remote_gradients)
        flight = self.comm.launch(ReduceScatter(self.axis), self._by_rank(remote_gradients.message))
        compute(plan.last_local_tiles, mine, gradients)
        gradients.message.add_(self.comm.wait(flight))
        return gradients

    def _gather_buffer(self, local: Columns) -> tuple[Tensor, Columns]:
        """Return a buffer for the columns of all ranks, and this rank's rows of it, filled in."""
        length = local.message.shape[0]
        whole = local.message.new_empty((self.axis.size * length, *local.message.shape[1:]))
        mine = whole[self.axis.rank * length : (self.axis.rank + 1) * length]
        mine.copy_(local.message)
        return whole, local.with_message(mine)

    def _in_order(self, x: Tensor) -> Tensor:
        """Reorder from rank order to position order: in zig-zag, first runs ascend by rank and second runs descend."""
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
