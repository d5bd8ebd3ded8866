"""Tiles merged by their log-sum-exps are attention of the whole, values and gradients; all ranks in one process."""

from __future__ import annotations

import pytest
import torch

from megapar.core.attention_mask import AttentionMask
from megapar.core.context_parallel.blockwise import Columns, attend_blockwise
from megapar.core.context_parallel.gathered import gathered_plan
from megapar.core.context_parallel.online_softmax import merge
from megapar.core.context_parallel.positions import SequenceLayout
from megapar.core.context_parallel.ring import ring_plan
from megapar.core.device.attention.blocks import AttentionBlock, block_reference
from megapar.core.device.attention.table import FULL
from megapar.core.device.attention.whole import attention_reference
from tests.support.attention import plain_attention_of

LENGTH, SAMPLES, HEADS, GROUPS, SIZE = 24, 2, 4, 2, 8  # SIZE: features of queries and keys
ENDS, LENGTHS = [5, 17, 24, 24 + 1, 24 + 13, 48], [24, 7]


def draw(dtype, value_dim=SIZE):
    generator = torch.Generator().manual_seed(3)
    heads = ((HEADS, SIZE), (GROUPS, SIZE), (GROUPS, value_dim))
    return [
        torch.randn(SAMPLES, n, LENGTH, size, generator=generator, dtype=torch.float64).to(dtype) for n, size in heads
    ]


class Neighbours:
    """What a transport does, without ranks: the columns of all are at hand, and gradients are left with their owner."""

    def __init__(self, rank, all_columns, gradients, gathered):
        self.rank, self.columns, self.gradients, self.gathered = rank, all_columns, gradients, gathered

    def _arrivals(self, of):
        if not self.gathered:
            size = len(of)
            return [of[(self.rank - step) % size] for step in range(1, size)]
        return [of[0].with_message(torch.cat([columns.message for columns in of])[self.gathered])]

    def forward(self, own, plan, compute):
        compute(plan.local_tiles, own)
        for tiles, columns in zip(plan.remote_tiles, self._arrivals(self.columns), strict=True):
            compute(tiles, columns)

    def backward(self, own, plan, compute):
        mine = own.zeros()
        compute(plan.first_local_tiles, own, mine)
        if self.gathered:
            (whole,) = self._arrivals(self.columns)
            gradients = whole.zeros()
            compute(plan.remote_tiles[0], whole, gradients)
            by_rank = torch.empty_like(gradients.message).index_copy_(0, torch.tensor(self.gathered), gradients.message)
            for theirs, share in zip(self.gradients, by_rank.split(own.message.shape[0]), strict=True):
                theirs.message.add_(share)
        else:
            for tiles, columns, theirs in zip(
                plan.remote_tiles, self._arrivals(self.columns), self._arrivals(self.gradients), strict=True
            ):
                compute(tiles, columns, theirs)
        compute(plan.last_local_tiles, own, mine)
        return mine


def shared(tensors, layout, mask, *, gathered, flash, dropout=0.0):
    """(output, gradients of q, k, v) of attention that ranks share, in order of position."""
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    positions = [layout.positions(LENGTH, rank) for rank in range(layout.size)]
    pieces = [[x[:, :, own] for x in (q, k, v)] for own in positions]
    columns = [Columns.of(*(x.detach() for x in piece[1:])) for piece in pieces]
    left = [one.zeros() for one in columns]
    held = [at for own in positions for at in own]
    order = sorted(range(LENGTH), key=held.__getitem__) if gathered else None
    outs = []
    for rank, piece in enumerate(pieces):
        plan = (gathered_plan if gathered else ring_plan)(layout, rank, mask)
        transport = Neighbours(rank, columns, left, order)
        outs.append(attend_blockwise(*piece, transport, plan, flash=flash, dropout=dropout))
    order = torch.tensor(sorted(range(LENGTH), key=held.__getitem__))
    y = torch.cat(outs, dim=2)[:, :, order]
    grads = list(torch.autograd.grad(y.square().sum(), (q, k, v)))
    for number, name in ((1, "k"), (2, "v")):
        grads[number] = grads[number] + torch.cat([getattr(one, name) for one in left], dim=2)[:, :, order]
    return y, *grads


def whole(tensors, mask):
    """The same by one call of the reference."""
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    y = plain_attention_of(mask, q, k, v)
    return y, *torch.autograd.grad(y.square().sum(), (q, k, v))


MASKS = {
    "causal": AttentionMask.of(SAMPLES, LENGTH, causal=True),
    "documents": AttentionMask.of(SAMPLES, LENGTH, causal=True, ends=ENDS),
    "both ways": AttentionMask.of(SAMPLES, LENGTH, causal=False),
    "padding": AttentionMask.of(SAMPLES, LENGTH, causal=False, lengths=LENGTHS),
}


@pytest.mark.parametrize("value_dim", [SIZE, 4, 24])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", MASKS)
def test_shared_attention_is_that_of_one_process(name, size, gathered, value_dim):
    mask, layout = MASKS[name], SequenceLayout(size, zigzag=MASKS[name].causal)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        tensors = draw(dtype, value_dim)
        got = shared(tensors, layout, mask, gathered=gathered, flash=dtype != torch.float64)
        want = whole([x.double() for x in tensors], mask)
        for a, b in zip(got, want, strict=True):
            assert a.dtype == dtype or a.dtype == torch.float32
            assert a.shape == b.shape
            assert float((a - b).detach().norm() / b.detach().norm()) < tolerance


def test_blocks_merge_in_any_order():
    q, k, v = draw(torch.float64)
    want = attention_reference(q, k, v, form=FULL)
    for cuts in ((8, 8, 8), (1, 20, 3)):
        parts = list(zip(k.split(cuts, dim=2), v.split(cuts, dim=2), strict=True))
        for order in (parts, parts[::-1]):
            out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype)
            for part in order:
                out, lse = merge(out, lse, block_reference(q, *part, causal=False))
            torch.testing.assert_close(out, want, rtol=0, atol=1e-13)
            scores = q @ k.repeat_interleave(2, 1).mT * SIZE**-0.5
            torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=1e-13)


@pytest.mark.parametrize("gathered", [False, True])
def test_dropout_keeps_the_mean_and_repeats_in_the_backward(gathered):
    """v's gradient of a sum is the sum of the weights that were not dropped, which the output tells, too."""
    q, k, _ = draw(torch.float64)
    v = torch.ones_like(k)
    layout, mask = SequenceLayout(2, zigzag=True), MASKS["causal"]
    totals = []
    for seed in range(30):
        torch.manual_seed(seed)
        y, _, _, dv = shared((q, k, v), layout, mask, gathered=gathered, flash=False, dropout=0.4)
        totals.append(float(y.detach().mean()))
        # y = (sum of kept weights) in every feature, so sum(y^2)'s gradient in v sums to 2 sum(y^2).
        assert float(dv.sum()) == pytest.approx(2 * float(y.detach().square().sum()))
    assert sum(totals) / len(totals) == pytest.approx(1.0, abs=0.05)


def test_blocks_merge_where_an_exponential_overflows():
    out, other = torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 2, 4)
    lse = torch.tensor([[[200.0, -200.0]]])
    merged, both = merge(out, lse, AttentionBlock(other, lse + 1))
    share = torch.sigmoid(torch.ones(()))
    torch.testing.assert_close(merged, torch.full_like(out, float(share)))
    torch.testing.assert_close(both, lse + 1 + torch.log1p(torch.exp(-torch.ones(()))))
