"""Blocks of attention merged by their log-sum-exps are attention of the whole; on ranks: test_method."""

from __future__ import annotations

import pytest
import torch

from megapar.core.context_parallel.online_softmax import OnlineSoftmax, merge
from megapar.core.context_parallel.tiles import Tile
from megapar.core.device.attention.blocks import AttentionBlock, block_reference
from megapar.core.device.attention.row_statistic import RowStatistic
from megapar.core.device.attention.table import FULL, LSE, MAXIMUM
from megapar.core.device.attention.whole import attention_reference
from tests.core.context_parallel.test_method import SIZE, draw


def test_blocks_merge_in_any_order():
    q, k, v = (x.transpose(1, 2) for x in draw())
    want = attention_reference(q, k, v, form=FULL)
    for cuts in ((16, 16, 16), (1, 40, 7)):
        parts = list(zip(k.split(cuts, dim=2), v.split(cuts, dim=2), strict=True))
        for order in (parts, parts[::-1]):
            out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype)
            for part in order:
                out, lse = merge(out, lse, block_reference(q, *part, causal=False))
            torch.testing.assert_close(out, want, rtol=0, atol=1e-13)
            scores = q @ k.repeat_interleave(2, 1).mT * SIZE**-0.5
            torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=1e-13)


def test_blocks_merge_where_an_exponential_overflows():
    out, other = torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 2, 4)
    lse = torch.tensor([[[200.0, -200.0]]])
    merged, both = merge(out, lse, AttentionBlock(other, lse + 1))
    share = torch.sigmoid(torch.ones(()))
    torch.testing.assert_close(merged, torch.full_like(out, float(share)))
    torch.testing.assert_close(both, lse + 1 + torch.log1p(torch.exp(-torch.ones(()))))


@pytest.mark.parametrize("kind", [LSE, MAXIMUM])
def test_tiles_give_the_statistic_of_whole_rows(kind):
    """A row's log-sum-exp is that of all of its tiles, whichever samples and rows they have; not all rows count."""
    q, k, v = (x.transpose(1, 2) for x in draw())
    length = q.shape[2]
    counted = torch.arange(length) < torch.tensor([[length], [7]])
    q = torch.where(counted[:, None, :, None], q, 4 * q)
    tiles = [Tile(None, range(length), range(20)), *(Tile(b, range(length), range(20, length)) for b in (0, 1))]
    largest = torch.full((q.shape[1],), -torch.inf, dtype=q.dtype)
    rows = OnlineSoftmax(q, v.shape[-1], flash=False, seen_by=RowStatistic(largest, kind, counted))
    rows.attend(tiles, k, v)
    torch.testing.assert_close(rows.result().out, attention_reference(q, k, v, form=FULL), rtol=0, atol=1e-13)
    scores = q @ k.repeat_interleave(2, 1).mT * SIZE**-0.5
    each = scores.logsumexp(-1) if kind == LSE else scores.amax(-1)
    want = each.masked_fill(~counted[:, None], -torch.inf).amax((0, 2))
    torch.testing.assert_close(largest, want, rtol=0, atol=1e-13)
    assert (each.amax((0, 2)) > want).any()  # what does not count would show
