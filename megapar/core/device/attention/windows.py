"""Causal attention in a window without a mask: blocks of rows, with the log-sum-exps that merge their tiles.

Rows are cut into blocks of w, the window, and each sees two blocks of keys. Row i of a block sees the keys 0..i of its
own block and the keys i + 1.. of the previous one, which is a causal tile with rows and keys reversed:

    keys of | previous block   | own block            a last block of r < w rows sees all of the previous block's keys
            | anti-causal      | causal               r.. as well, and those before in the reversed tile

Queries may be the last S of L positions, of which they see the last L - S < w before the first query. Then the blocks
are those of the keys, and the first one has w - (L - S) rows, which see all keys before them.

Shape letters: B batch, N query heads, G key-value heads, S queries, L keys (S except in a slice), D head size of
queries and keys, V of values and the output, F any features, w window.
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
    kernel of a CPU lacks. ``rows`` is the end of rows, merged over their tiles. Raises ValueError for a window that
    hides nothing. Shapes as of ``attention_reference``; q may be the last positions of k, of which those before the
    first row's window are not read.
    """
    queries, length = q.shape[2], k.shape[2]
    if not 0 < window < length:
        raise ValueError(f"a window of {window} of {length} keys: pass 1 to {length - 1}, or call causal attention")
    if dropout:
        visible = causal_keys(queries, length, q.device, before=length - queries, window=window)
        return plain_attention(q, k, v, visible, dropout, rows)
    if (unseen := length - queries - window + 1) > 0:
        k, v = (x.narrow(2, unseen, length - unseen) for x in (k, v))
    out, lse = WindowedAttention.apply(q, k, v, window)
    return out if rows is None else rows.end(out, lse)


class _Region(NamedTuple):
    """Equal parts of blocks: positions first + w b + i, for every block b < blocks and row i < rows."""

    first: int
    blocks: int
    rows: int

    def earlier(self, by: int) -> _Region:
        """Return the parts ``by`` positions earlier."""
        return self._replace(first=self.first - by)

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

    @property
    def own(self) -> bool:
        """True for a tile of a row's own block."""
        return self.causal and not self.reversed

    def take(self, x: Tensor, region: _Region, window: int) -> Tensor:
        """Return the part of x [B, heads, S, F] that is in a region as [B blocks, heads, rows, F]."""
        part = region.of(x, window).flatten(0, 1)
        return part.flip(2) if self.reversed else part

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of the tile."""
        return self.take(q, self.queries, window), self.take(k, self.keys, window), self.take(v, self.keys, window)

    def put_back(self, part: Tensor, region: _Region) -> Tensor:
        """Undo ``take``: return [B, blocks, heads, rows, F]."""
        return (part.flip(2) if self.reversed else part).unflatten(0, (-1, region.blocks))


def _tiles(length: int, window: int, before: int) -> Iterator[_Tile]:
    """Yield the tiles of a sequence: first those of own blocks, which see every row, then those of earlier keys.

    length: Keys, of which the first ``before`` < ``window`` have no row. Queries are counted from the first row.
    """
    blocks, rest = divmod(length, window)
    end, cut = blocks * window, int(before > 0)  # the first block may have fewer rows than keys
    first = _Region(0, 1, window - before)
    if cut:
        yield _Tile(first, _Region(before, 1, window - before))
    if blocks > cut:
        whole = _Region(cut * window, blocks - cut, window)
        yield _Tile(whole.earlier(before), whole)
    if rest:
        last = _Region(end, 1, rest)
        yield _Tile(last.earlier(before), last)
    if cut:
        yield _Tile(first, _Region(0, 1, before), causal=False)
    if blocks > 1 and window > 1:
        rows = _Region(window, blocks - 1, window - 1)
        yield _Tile(rows.earlier(before), _Region(1, blocks - 1, window - 1), reversed=True)
    if rest:
        yield _Tile(last.earlier(before), _Region(end - window + rest, 1, window - rest), causal=False)
    if rest > 1:
        rows = _Region(end, 1, rest - 1)
        yield _Tile(rows.earlier(before), _Region(end - window + 1, 1, rest - 1), reversed=True)


class WindowedAttention(torch.autograd.Function):
    """Attention of q [B, N, S, D], k [B, G, L, D], v [B, G, L, V] to [B, N, S, V] in a window of w keys, L < w + S."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
        """Compute all tiles and merge them to [B, N, S, V]. Also return the log-sum-exps [B, N, S]."""
        forward, wide = block_cpu if q.is_cpu else block_reference, at_least_fp32(q.dtype)
        out = q.new_empty((*q.shape[:3], v.shape[-1]), dtype=wide)
        lse = q.new_full((*q.shape[:3], 1), -torch.inf, dtype=wide)
        for tile in _tiles(k.shape[2], window, k.shape[2] - q.shape[2]):
            block = forward(*tile.inputs(q, k, v, window), causal=tile.causal)
            merged, sums = (tile.queries.of(x, window) for x in (out, lse))
            part, part_sums = (tile.put_back(x, tile.queries) for x in (block.out, block.lse.unsqueeze(-1)))
            if tile.own:
                merged.copy_(part)
                sums.copy_(part_sums)
                continue
            whole = torch.logaddexp(sums, part_sums)
            merged.mul_((sums - whole).exp_()).add_(part * (part_sums - whole).exp_())
            sums.copy_(whole)
        ctx.window = window
        ctx.mark_non_differentiable(lse := lse.squeeze(-1))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out := out.to(q.dtype), lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return dq [B, N, S, D], dk [B, G, L, D] and dv [B, G, L, V], summed over tiles in max(fp32, dtype)."""
        q, k, v, out, lse = ctx.saved_tensors
        backward, window = block_backward_cpu if q.is_cpu else block_backward_reference, ctx.window
        sums = [x.new_zeros(x.shape, dtype=lse.dtype) for x in (q, k, v)]
        upstream = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()  # the kernel takes no other features
        for tile in _tiles(k.shape[2], window, k.shape[2] - q.shape[2]):
            grad, own, rows = (tile.take(x, tile.queries, window) for x in (upstream, out, lse.unsqueeze(-1)))
            block = AttentionBlock(own, rows.squeeze(-1))
            parts = backward(grad, *tile.inputs(q, k, v, window), block, causal=tile.causal)
            for total, part, region in zip(sums, parts, (tile.queries, tile.keys, tile.keys), strict=True):
                total_view = region.of(total, window)
                total_view += tile.put_back(part, region)
        return *(total.to(q.dtype) for total in sums), None
