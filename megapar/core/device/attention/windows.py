"""Causal attention in a window without a mask: blocks of rows, with the log-sum-exps that merge their tiles.

Rows are cut into blocks of w, the window, and each sees two blocks of keys. Row i of a block sees the keys 0..i of its
own block and the keys i + 1.. of the previous one, which is a causal tile with rows and keys reversed:

    keys of | previous block   | own block            a last block of r < w rows sees all of the previous block's keys
            | anti-causal      | causal               r.. as well, and those before in the reversed tile

Shape letters: B batch, N query heads, G key-value heads, S positions, D head size of queries and keys, V of values and
the output, F any features, w window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.device.attention.blocks import (
    AttentionBlock,
    block_backward_cpu,
    block_backward_reference,
    block_cpu,
    block_reference,
)
from megapar.core.device.attention.mask import causal_keys
from megapar.core.device.attention.row_statistic import Rows
from megapar.core.device.attention.whole import plain_attention
from megapar.core.device.dtypes import at_least_fp32


def attention_window(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, dropout: float = 0.0, rows: Rows = None
) -> Tensor:
    """Compute causal attention whose position i attends to i - window + 1..i, by fused tiles of window x window.

    A GPU without FlashAttention has plain products for tiles. The mask is materialized with dropout only, which the
    kernel of a CPU lacks. ``rows`` counts the log-sum-exps of rows, merged over their tiles. Raises ValueError for a
    window that hides nothing. Shapes as of ``attention_reference``.
    """
    length = q.shape[2]
    if not 0 < window < length:
        raise ValueError(f"a window of {window} of {length} keys: pass 1 to {length - 1}, or call causal attention")
    if dropout:
        return plain_attention(q, k, v, causal_keys(length, length, q.device, window=window), dropout, rows)
    return WindowedAttention.apply(q, k, v, window, rows)


class _Region(NamedTuple):
    """Equal parts of blocks: positions first + w b + i, for every block b < blocks and row i < rows."""

    first: int
    blocks: int
    rows: int

    def of(self, x: Tensor, window: int) -> Tensor:
        """Return the view [B, blocks, heads, rows, F] of x [B, heads, S, F]."""
        part = x.narrow(2, self.first, (self.blocks - 1) * window + self.rows)
        return part.unfold(2, self.rows, window).mT.transpose(1, 2)


class _Tile(NamedTuple):
    """A tile of every block of queries. Rows and keys of a reversed one are in descending order."""

    queries: _Region
    keys: _Region
    causal: bool = True
    reversed: bool = False

    def take(self, x: Tensor, region: _Region, window: int) -> Tensor:
        """Return the part of x [B, heads, S, F] that is in a region as [B blocks, heads, rows, F]."""
        part = region.of(x, window).flatten(0, 1)
        return part.flip(2) if self.reversed else part

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of the tile."""
        return self.take(q, self.queries, window), self.take(k, self.keys, window), self.take(v, self.keys, window)

    def back(self, part: Tensor, region: _Region) -> Tensor:
        """Undo ``take``: return [B, blocks, heads, rows, F]."""
        return (part.flip(2) if self.reversed else part).unflatten(0, (-1, region.blocks))


def _tiles(length: int, window: int) -> Iterator[_Tile]:
    """Yield the tiles of a sequence: first those of own blocks, which see every row, then those of previous blocks."""
    blocks, rest = divmod(length, window)
    end = blocks * window
    yield _Tile(own := _Region(0, blocks, window), own)
    if rest:
        yield _Tile(own := _Region(end, 1, rest), own)
    if blocks > 1 and window > 1:
        yield _Tile(_Region(window, blocks - 1, window - 1), _Region(1, blocks - 1, window - 1), reversed=True)
    if rest:
        yield _Tile(_Region(end, 1, rest), _Region(end - window + rest, 1, window - rest), causal=False)
    if rest > 1:
        yield _Tile(_Region(end, 1, rest - 1), _Region(end - window + 1, 1, rest - 1), reversed=True)


class WindowedAttention(torch.autograd.Function):
    """Attention of q [B, N, S, D], k [B, G, S, D], v [B, G, S, V] to [B, N, S, V] in a window of w < S keys."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int, rows: Rows = None) -> Tensor:
        """Compute all tiles and merge them to [B, N, S, V]."""
        forward, wide = block_cpu if q.is_cpu else block_reference, at_least_fp32(q.dtype)
        out = q.new_empty((*q.shape[:3], v.shape[-1]), dtype=wide)
        lse = q.new_full((*q.shape[:3], 1), -torch.inf, dtype=wide)
        for tile in _tiles(q.shape[2], window):
            block = forward(*tile.inputs(q, k, v, window), causal=tile.causal)
            merged, sums = (tile.queries.of(x, window) for x in (out, lse))
            part, part_sums = (tile.back(x, tile.queries) for x in (block.out, block.lse.unsqueeze(-1)))
            if tile.queries == tile.keys:
                merged.copy_(part)
                sums.copy_(part_sums)
                continue
            whole = torch.logaddexp(sums, part_sums)
            merged.mul_((sums - whole).exp_()).add_(part * (part_sums - whole).exp_())
            sums.copy_(whole)
        if rows is not None:
            rows.see_lse(lse.squeeze(-1))
        ctx.window = window
        ctx.save_for_backward(q, k, v, out := out.to(q.dtype), lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return dq [B, N, S, D], dk [B, G, S, D] and dv [B, G, S, V], summed over tiles in max(fp32, dtype)."""
        q, k, v, out, lse = ctx.saved_tensors
        backward, window = block_backward_cpu if q.is_cpu else block_backward_reference, ctx.window
        sums = [x.new_zeros(x.shape, dtype=lse.dtype) for x in (q, k, v)]
        upstream = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()  # the kernel takes no other features
        for tile in _tiles(q.shape[2], window):
            grad, own, rows = (tile.take(x, tile.queries, window) for x in (upstream, out, lse))
            block = AttentionBlock(own, rows.squeeze(-1))
            parts = backward(grad, *tile.inputs(q, k, v, window), block, causal=tile.causal)
            for total, part, region in zip(sums, parts, (tile.queries, tile.keys, tile.keys), strict=True):
                total_view = region.of(total, window)
                total_view += tile.back(part, region)
        return *(total.to(q.dtype) for total in sums), None, None
