"""Attention of a rank's queries, tile by tile, merged by the tiles' log-sum-exps.

Shape letters: B batch, N query heads, G key-value heads, S queries, L keys, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megapar.core.context_parallel.tiles import Tile
from megapar.core.device.block import Block, block_backward_reference, block_reference
from megapar.core.device.dtypes import wide
from megapar.core.device.ops import op

Index = tuple[slice, slice, slice]


def merge(out: Tensor, lse: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Rows that saw some keys, and the same that saw others, as rows that saw both. lse: -inf where none was seen."""
    both = torch.logaddexp(lse, block.lse)
    before, now = ((part - both).exp().unsqueeze(-1) for part in (lse, block.lse))
    return out * before + block.out * now, both


class Rows:
    """The rows of the attention matrix that belong to q [B, N, S, D], as far as tiles of them have been seen.

    flash: fused kernels where the device has them. out [B, N, S, D] and lse [B, N, S] are in max(fp32, dtype).
    """

    def __init__(self, q: Tensor, *, flash: bool, dropout: float = 0.0) -> None:
        self._q, self._dropout = q, dropout
        self._attend = op("attention_block", q) if flash else block_reference
        exact = wide(q.dtype)
        self.out = torch.zeros(q.shape, dtype=exact, device=q.device)
        self.lse = torch.full(q.shape[:-1], -torch.inf, dtype=exact, device=q.device)
        self.drawn: list[tuple[Any, ...]] = []

    def see(self, tiles: Iterable[Tile], k: Tensor, v: Tensor) -> None:
        """Let rows look at columns: k and v [B, G, L, D]."""
        for tile in tiles:
            rows, columns = _index(tile.sample, tile.queries), _index(tile.sample, tile.keys)
            # (a Block: tables of operators only know tensors)
            block: Block = self._attend(  # type: ignore[assignment]
                self._q[rows], k[columns], v[columns], causal=tile.causal, dropout=self._dropout
            )
            self.drawn.append(block.drawn)
            self.out[rows], self.lse[rows] = merge(self.out[rows], self.lse[rows], block)

    def result(self) -> Block:
        """What the rows came to, in q's dtype; ``drawn`` is not told."""
        return Block(self.out.to(self._q.dtype), self.lse)


class RowGradients:
    """The backward of ``Rows``: dq [B, N, S, D] in max(fp32, dtype), as far as tiles have been seen.

    drawn: per tile, in the order in which they are seen here.
    """

    def __init__(
        self, grad: Tensor, q: Tensor, rows: Block, drawn: Iterable[tuple[Any, ...]], *, flash: bool, dropout: float
    ) -> None:
        self._grad, self._q, self._rows, self._drawn, self._dropout = grad, q, rows, iter(drawn), dropout
        self._differentiate = op("attention_block_backward", q) if flash else block_backward_reference
        self.dq = torch.zeros(q.shape, dtype=wide(q.dtype), device=q.device)

    def see(self, tiles: Iterable[Tile], k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add to the gradients dk and dv of columns k and v, all [B, G, L, D]."""
        for tile in tiles:
            rows, columns = _index(tile.sample, tile.queries), _index(tile.sample, tile.keys)
            block = Block(self._rows.out[rows], self._rows.lse[rows], next(self._drawn))
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
