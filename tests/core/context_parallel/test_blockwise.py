"""Blocks of attention merged by their log-sum-exps are attention of the whole; on ranks: test_method."""

from __future__ import annotations

import pytest
import torch

from megapar.core.context_parallel.blockwise import TilePlan, attend_blockwise
from megapar.core.context_parallel.online_softmax import OnlineSoftmax, merge
from megapar.core.context_parallel.tiles import Tile
from megapar.core.device.attention.blocks import AttentionBlock, block_reference
from megapar.core.device.attention.row_statistic import RowStatistic
from megapar.core.device.attention.sinks import SinkRows
from megapar.core.device.attention.table import FULL, LSE, MAXIMUM
from megapar.core.device.attention.whole import attention_reference
from tests.core.context_parallel.test_method import SIZE, draw
from tests.core.device.attention.test_large_scores import SINKS, TOLERANCE, sums
from tests.core.device.attention.test_sinks import formula


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


class Alone:
    """A transport that has nothing to move."""

    def forward(self, local, plan, compute):
        compute(plan.local_tiles, local)

    def backward(self, local, plan, compute):
        gradients = local.zeros()
        compute(plan.local_tiles, local, gradients)
        return gradients


@pytest.mark.parametrize("kind", ["", LSE, MAXIMUM])
@pytest.mark.parametrize("flash", [False, True])
def test_sinks_come_once_after_all_tiles(flash, kind):
    """With or without a statistic, which is that of rows without a sink."""
    q, k, v = (x.transpose(1, 2).contiguous().requires_grad_() for x in draw())
    length, heads = q.shape[2], q.shape[1]
    sinks = torch.tensor([8.0, -8.0, 0.5, 3.0], dtype=q.dtype, requires_grad=True)
    tiles = tuple(Tile(None, range(length), keys) for keys in (range(20), range(20, 21), range(21, length)))
    largest = torch.full((heads,), -torch.inf, dtype=q.dtype)
    rows = SinkRows(sinks, RowStatistic(largest, kind) if kind else None)
    if kind == MAXIMUM and flash:
        return  # the kernel has no maxima
    y = attend_blockwise(q, k, v, Alone(), TilePlan(tiles, (), tiles, ()), flash=flash, seen_by=rows)
    scores = q @ k.repeat_interleave(2, 1).mT * SIZE**-0.5
    wide = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)), -1)
    want = wide.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(y, want, rtol=0, atol=1e-13)
    gradients = (torch.autograd.grad(x.square().sum(), (q, k, v, sinks), retain_graph=True) for x in (y, want))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
    if kind:
        each = scores.logsumexp(-1) if kind == LSE else scores.amax(-1)
        torch.testing.assert_close(largest, each.detach().amax((0, 2)), rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("flash", [False, True])
def test_tiles_of_scores_of_200_merge_as_in_fp64(flash, dtype):
    """A tile may hold all of a row's weight or none of it, and so may the sink."""
    factors = zip((9, 9, 1), draw(), strict=True)
    drawn = [*((factor * x).transpose(1, 2).contiguous() for factor, x in factors), torch.tensor(SINKS)]
    own = [x.to(dtype).requires_grad_() for x in drawn]
    exact = [x.detach().double().requires_grad_() for x in own]
    length = own[0].shape[2]
    tiles = tuple(Tile(None, range(length), keys) for keys in (range(20), range(20, 21), range(21, length)))
    plan = TilePlan(tiles, (), tiles, ())
    y = attend_blockwise(*own[:3], Alone(), plan, flash=flash, seen_by=SinkRows(own[3]))
    want = formula(*exact, seen := torch.ones(1, 1, length, length, dtype=torch.bool))
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    found = (y, *torch.autograd.grad(y, own, upstream))
    wanted = (want, *torch.autograd.grad(want, exact, upstream.double()))
    with torch.no_grad():
        assert (exact[0] @ exact[1].repeat_interleave(2, 1).mT).abs().max() * SIZE**-0.5 > 200
        for a, b, size in zip(found, wanted, sums(*exact, seen, upstream.double()), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=0, atol=TOLERANCE[dtype] * float(size.max()))
