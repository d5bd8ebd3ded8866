"""Windows of keys over the ranks of cp: each rank takes the keys before its runs that its rows see, and no others.

    cp 4, zig-zag      0  1  2  3  3  2  1  0
    rank 1, rows          x              x
    its keys           .o x          .oo x        o from other ranks, each once: at most w - 1 before a run

The layout is that of layers without a window. All rows for a rank are one message, from each rank that holds some of
them: if w is larger than a run, several do. Gradients of the keys return the same way. Documents cut what is sent: a
row sees nothing before its own. With slices, rows that came for an earlier one are kept and do not come again.

Shape letters: B batch, G key-value heads, S positions of this rank, D head size of keys, V of values, U keys that this
rank's rows see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.comm.async_pairs import start, wait
from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import AllToAll
from megapar.core.comm.in_flight import CommContext
from megapar.core.context_parallel.halo import Halo
from megapar.core.device.dtypes import at_least_fp32


@dataclass(frozen=True)
class WindowKeys:
    """The keys that the rows of this rank see, of which other ranks hold some."""

    axis: Axis
    comm: CommContext

    def fetch(
        self, k: Tensor, v: Tensor, halo: Halo, kept: Callable[[Tensor], Tensor] = lambda arrived: arrived
    ) -> tuple[Tensor, Tensor]:
        """Return keys [B, U, G, D] and values [B, U, G, V], in order of position, as ``halo.rows`` cuts them.

        k [B, S, G, D] and v [B, S, G, V] are those of this rank, in the order of its storage. Every rank must call it.
        kept: returns the rows [B, any, G, D + V] that arrived so far, given those of this slice.
        """
        own = torch.cat((k, v), dim=-1).transpose(0, 1)  # [S, B, G, D + V]
        exchange = AllToAll(self.axis, tuple(sum(map(len, to)) for to in halo.sent), halo.received)
        message = _TakenRows.apply([(0, run) for to in halo.sent for run in to], own)
        arrived = kept(wait(*start(exchange, message, self.comm)).transpose(0, 1)).transpose(0, 1)
        seen = _TakenRows.apply(halo.pieces, own, arrived).transpose(0, 1)
        keys, values = seen.split([k.shape[-1], v.shape[-1]], dim=-1)
        return keys, values


class _TakenRows(torch.autograd.Function):
    """Rows [n, ..] of several tensors [any, ..], one after another. Gradients are summed in max(fp32, dtype)."""

    @staticmethod
    def forward(ctx: Any, pieces: Sequence[tuple[int, range]], *tensors: Tensor) -> Tensor:
        ctx.pieces, ctx.rows = pieces, [x.shape[0] for x in tensors]
        parts = [tensors[number][run.start : run.stop] for number, run in pieces]
        return torch.cat(parts) if parts else tensors[0][:0].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        wide = at_least_fp32(grad.dtype)
        sums = [grad.new_zeros((rows, *grad.shape[1:]), dtype=wide) for rows in ctx.rows]
        for (number, run), part in zip(ctx.pieces, grad.split([len(run) for _, run in ctx.pieces]), strict=True):
            sums[number][run.start : run.stop] += part
        return None, *(x.to(grad.dtype) for x in sums)
