"""Attention of a rank's queries tile by tile: an online softmax, whose tiles are merged by their log-sum-exps.

Shape letters: B batch, N query heads, G key-value heads, S queries, L keys, D head size of queries and keys, V of
values and outputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megapar.core.context_parallel.tiles import Tile
from megapar.core.device.block_attention import AttentionBlock, block_backward_reference, block_reference
from megapar.core.device.dtypes import at_least_fp32
from megapar.core.device.ops import op

Index = tuple[slice, slice, slice]


def merge(out: Tensor, lse: Tensor, block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """Merge rows that saw some keys with the same rows that saw others. lse: -inf where no key was seen."""
    both = torch.logaddexp(lse, block.lse)
    before, now = ((part - both).exp().unsqueeze(-1) for part in (lse, block.lse))
    return out * before + block.out * now, both


class OnlineSoftmax:
    """The rows of the attention matrix that belong to q [B, N, S, D], over the tiles that they have seen so far.

    value_dim: V. flash: fused kernels where the device has them. out: [B, N, S, V], lse: [B, N, S], both in
    max(fp32, dtype). drawn: per tile what repeats its dropout.
    """

    def __init__(self, q: Tensor, value_dim: int, *, flash: bool, dropout: float = 0.0) -> None:
        self._q, self._dropout = q, dropout
        self._attend = op("attention_block", q) if flash else block_reference
        exact = at_least_fp32(q.dtype)
        self.out = torch.zeros((*q.shape[:-1], value_dim), dtype=exact, device=q.device)
        self.lse = torch.full(q.shape[:-1], -torch.inf, dtype=exact, device=q.device)
        self.drawn: list[tuple[Any, ...]] = []

    def see(self, tiles: Iterable[Tile], k: Tensor, v: Tensor) -> None:
        """Let rows attend to columns: k [B, G, L, D] and v [B, G, L, V]."""
        for tile in tiles:
            rows, columns = _index(tile.sample, tile.queries), _index(tile.sample, tile.keys)
            # (an AttentionBlock: the table's operators are typed as functions of tensors)
            block: AttentionBlock = self._attend(  # type: ignore[assignment]
                self._q[rows], k[columns], v[columns], causal=tile.causal, dropout=self._dropout
            )
            self.drawn.append(block.drawn)
            self.out[rows], self.lse[rows] = merge(self.out[rows], self.lse[rows], block)

    def result(self) -> AttentionBlock:
        """The rows over all tiles, in q's dtype; ``drawn`` is left out."""
        return AttentionBlock(self.out.to(self._q.dtype), self.lse)


class OnlineSoftmaxBackward:
    """The backward of ``OnlineSoftmax``: dq [B, N, S, D] in max(fp32, dtype), over the tiles seen so far.

    drawn: per tile, in the order in which they are seen here.
    """

    def __init__(
        self,
        grad: Tensor,
        q: Tensor,
        rows: AttentionBlock,
        drawn: Iterable[tuple[Any, ...]],
        *,
        flash: bool,
        dropout: float,
    ) -> None:
        self._grad, self._q, self._rows, self._drawn, self._dropout = grad, q, rows, iter(drawn), dropout
        self._differentiate = op("attention_block_backward", q) if flash else block_backward_reference
        self.dq = torch.zeros(q.shape, dtype=at_least_fp32(q.dtype), device=q.device)

    def see(self, tiles: Iterable[Tile], k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add to the gradients of columns: k and dk [B, G, L, D], v and dv [B, G, L, V]."""
        for tile in tiles:
            rows, columns = _index(tile.sample, tile.queries), _index(tile.sample, tile.keys)
            block = AttentionBlock(self._rows.out[rows], self._rows.lse[rows], next(self._drawn))
            grads = self._differentiate(
                self._grad[rows],
                self._q[rows],
                k[columns],
                v[columns],
                block,
                causal=tile.causal,
                dropout=self._dropout,
            )
            self.dq[rows] += grads[0]
            dk[columns] += grads[1]
            dv[columns] += grads[2]


def _index(sample: int | None, places: range) -> Index:
    which = slice(None) if sample is None else slice(sample, sample + 1)
    return which, slice(None), slice(places.start, places.stop)
