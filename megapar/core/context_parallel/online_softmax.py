"""Online softmax: attention of a rank's queries tile by tile, merging tiles by their log-sum-exps.

Shape letters: B batch, N query heads, G key-value heads, S queries, L keys, D head size of queries and keys, V of
values and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from megapar.core.context_parallel.tiles import Tile
from megapar.core.device.attention.blocks import AttentionBlock, block_backward_reference, block_reference
from megapar.core.device.attention.row_statistic import RowEnd, Rows
from megapar.core.device.attention.table import MAXIMUM
from megapar.core.device.dtypes import at_least_fp32
from megapar.core.device.ops import op

Index = tuple[slice, slice, slice]


def merge(out: Tensor, lse: Tensor, block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """Merge the result of rows over some keys with the result of the same rows over other keys.

    lse: log-sum-exp of each row so far; -inf if the row has not attended to any key yet.
    """
    both = torch.logaddexp(lse, block.lse)
    before, now = ((part - both).exp().unsqueeze(-1) for part in (lse, block.lse))
    return out * before + block.out * now, both


class OnlineSoftmax:
    """The rows of the attention matrix for queries q [B, N, S, D], accumulated over the tiles so far.

    ``seen_by`` counts the rows, by their maxima tile by tile, or by the log-sum-exps of all tiles at the end. It weighs
    none: sinks are left to the caller.

    Attributes:
        key_dim: D.
        out: [B, N, S, V], in max(fp32, dtype).
        lse: [B, N, S], log-sum-exp of each row, in max(fp32, dtype).
        drawn: The random state of each tile, with which the backward repeats its dropout.
    """

    def __init__(self, q: Tensor, value_dim: int, *, flash: bool, dropout: float = 0.0, seen_by: Rows = None) -> None:
        self._q, self._dropout, self._seen_by = q, dropout, seen_by
        self.key_dim = q.shape[-1]
        # The operator table types every operator as a function of tensors; this one returns an AttentionBlock.
        self._block: Callable[..., Any] = op("attention_block", q) if flash else block_reference
        exact = at_least_fp32(q.dtype)
        self.out = torch.zeros((*q.shape[:-1], value_dim), dtype=exact, device=q.device)
        self.lse = torch.full(q.shape[:-1], -torch.inf, dtype=exact, device=q.device)
        self.drawn: list[tuple[Any, ...]] = []

    def attend(self, tiles: Iterable[Tile], k: Tensor, v: Tensor) -> None:
        """Attend to the columns k [B, G, L, D] and v [B, G, L, V], tile by tile."""
        for tile in tiles:
            rows, columns = _index(tile.sample, tile.queries), _index(tile.sample, tile.keys)
            block: AttentionBlock = self._block(
                self._q[rows], k[columns], v[columns], causal=tile.causal, dropout=self._dropout, **self._seen(rows)
            )
            self.drawn.append(block.drawn)
            self.out[rows], self.lse[rows] = merge(self.out[rows], self.lse[rows], block)

    def _seen(self, rows: Index) -> dict[str, RowEnd]:
        """Return the argument by which a block of some rows counts them by their maxima."""
        if self._seen_by is None or self._seen_by.kind != MAXIMUM:
            return {}
        return {"rows": self._seen_by.at(rows[0], rows[2])}

    def result(self) -> AttentionBlock:
        """Return the rows merged over all tiles, in q's dtype and without ``drawn``."""
        if self._seen_by is not None and self._seen_by.kind != MAXIMUM:
            self._seen_by.see_lse(self.lse)
        return AttentionBlock(self.out.to(self._q.dtype), self.lse)


class OnlineSoftmaxBackward:
    """The backward of ``OnlineSoftmax``: accumulates dq [B, N, S, D] in max(fp32, dtype); ``key_dim`` is D.

    drawn: the random state of each tile, in the order in which ``differentiate`` receives the tiles.
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
        self._block_backward = op("attention_block_backward", q) if flash else block_backward_reference
        self.key_dim = q.shape[-1]
        self.dq = torch.zeros(q.shape, dtype=at_least_fp32(q.dtype), device=q.device)

    def differentiate(self, tiles: Iterable[Tile], k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add to dq, and to the columns' gradients: k and dk [B, G, L, D], v and dv [B, G, L, V]."""
        for tile in tiles:
            rows, columns = _index(tile.sample, tile.queries), _index(tile.sample, tile.keys)
            block = AttentionBlock(self._rows.out[rows], self._rows.lse[rows], next(self._drawn))
            grads = self._block_backward(
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
