"""The three algorithms on ranks: attention of the whole, and nothing is in flight afterwards."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from megapar.core.attention_mask import AttentionMask
from megapar.core.comm.accounts import CommBytes
from megapar.core.comm.axis import Axis
from megapar.core.context_parallel.blockwise import attend_blockwise
from megapar.core.context_parallel.heads import to_heads, to_positions
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.context_parallel.positions import GATHERED, RING, ULYSSES, choose_layout
from megapar.core.context_parallel.slices import SharedSlices
from tests.support.attention import plain_attention_of
from tests.support.ranks import run_ranks
from tests.support.traffic import RecordedTraffic

SAMPLES, LENGTH, HEADS, GROUPS, SIZE = 2, 48, 4, 2, 8  # SIZE: features of queries and keys
MASKS = {
    "causal": AttentionMask.of(SAMPLES, LENGTH, causal=True),
    "documents": AttentionMask.of(SAMPLES, LENGTH, causal=True, ends=[9, 34, 48, 48 + 1, 48 + 26, 96]),
    "both ways": AttentionMask.of(SAMPLES, LENGTH, causal=False),
    "padding": AttentionMask.of(SAMPLES, LENGTH, causal=False, lengths=[48, 14]),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def make(rank, size, algorithm, comm, *, causal=True, slices=1, sent=None, **more):
    """The method of this rank of ``size`` that share a sequence. sent: counts bytes."""
    layout = choose_layout(algorithm, size, causal=causal, length=LENGTH, slices=slices, balanced=slices == 3)
    axis = Axis("cp", size, rank, dist.group.WORLD, tuple(range(size)), CommBytes() if sent is None else sent)
    return ContextParallel(axis, algorithm, layout, comm, **more)


def draw(value_dim=SIZE, dtype=torch.float64, factor=1):
    """Queries, keys and values; the scores grow with the square of the factor."""
    generator = torch.Generator().manual_seed(5)
    heads = ((HEADS, SIZE), (GROUPS, SIZE), (GROUPS, value_dim))
    drawn = [torch.randn(SAMPLES, LENGTH, n, size, generator=generator, dtype=torch.float64) for n, size in heads]
    return [(x * scale).to(dtype) for x, scale in zip(drawn, (factor, factor, 1), strict=True)]


def attend_heads(method, heads, mask, *, flash=False, dropout=0.0, expansion=None):
    """Queries, keys and values [B, heads, S/cp, D] of this rank to [B, S/cp, N, V], whole or slice by slice."""
    if method.layout.slices == 1:
        options = {"flash": flash, "dropout": dropout, "expansion": expansion}
        return attend_blockwise(*heads, method.transport, method.plan(mask), **options).transpose(1, 2)
    plans = method.slice_plans(mask)
    shared = SharedSlices(method.axis, method.slice_transport, plans, flash=flash)
    lengths = [len(plan.runs[method.axis.rank]) for plan in plans]
    pieces = zip(*(x.split(lengths, dim=2) for x in heads), strict=True)
    parts = [shared.attend(*piece, number, dropout, expansion) for number, piece in enumerate(pieces)]
    assert shared.gradients is None
    return torch.cat(parts, dim=2).transpose(1, 2)


def attend(method, q, k, v, mask, **options):
    """q, k, v [B, S/cp, heads, D] of this rank to y of the same."""
    if method.deals_heads:
        q, k, v = (x.transpose(1, 2) for x in to_heads(q, k, v, method.axis, method.comm))
        return to_positions(plain_attention_of(mask, q, k, v).transpose(1, 2), method.axis, method.comm)
    return attend_heads(method, [x.transpose(1, 2) for x in (q, k, v)], mask, **options)


def whole(mask, tensors):
    """(y, gradients of q, k, v) of one process."""
    q, k, v = (x.double().requires_grad_() for x in tensors)
    y = plain_attention_of(mask, *(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    return y, torch.autograd.grad(y.square().sum(), (q, k, v))


def worst(found, wanted):
    """The largest error of a tensor, relative to the tensor."""
    return max(float((a - b).detach().norm() / b.detach().norm()) for a, b in zip(found, wanted, strict=True))


def compare(rank, size, algorithm, name, value_dim=SIZE, slices=1, dtype=torch.float64, factor=1):
    """(worst error, launches and waits of forward and backward, bytes sent)."""
    mask, sent, comm = MASKS[name], CommBytes(), RecordedTraffic()
    method = make(rank, size, algorithm, comm, causal=mask.causal, slices=slices, sent=sent)
    own = method.layout.positions(LENGTH, rank)
    q, k, v = (x[:, own].requires_grad_() for x in draw(value_dim, dtype, factor))
    y = attend(method, q, k, v, mask, flash=dtype != torch.float64)
    forward = list(comm.events)
    grads = torch.autograd.grad(y.square().sum(), (q, k, v))
    comm.check_settled()
    want, want_grads = whole(mask, draw(value_dim, dtype, factor))
    error = worst((y, *grads), [x[:, own] for x in (want, *want_grads)])
    return error, forward, comm.events[len(forward) :], dict(sent)


@pytest.mark.parametrize(
    ("size", "name"),
    [(2, "causal"), (2, "both ways"), (2, "padding"), (3, "documents"), (3, "padding"), (4, "documents")],
)
@pytest.mark.parametrize("algorithm", [RING, ULYSSES, GATHERED])
def test_shared_attention_is_that_of_one_process(algorithm, size, name):
    if algorithm == ULYSSES and size == 3:
        pytest.skip("three ranks cannot share four heads")
    for error, *_ in run_ranks(size, compare, algorithm, name, backend="late"):
        assert error < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value_dim", [SIZE, 24])
@pytest.mark.parametrize("algorithm", [RING, GATHERED])
def test_lower_precisions_are_near(algorithm, value_dim, dtype):
    for error, *_ in run_ranks(2, compare, algorithm, "documents", value_dim, 1, dtype, backend="late"):
        assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("algorithm", [RING, GATHERED])
def test_scores_of_200_are_merged_in_fp32(algorithm, slices):
    q, k, _ = draw(factor=9)
    assert torch.einsum("bsnd,btnd->bnst", q, k.repeat_interleave(2, 2)).abs().max() * SIZE**-0.5 > 200
    for error, *_ in run_ranks(2, compare, algorithm, "documents", SIZE, slices, torch.float32, 9, backend="late"):
        assert error < 1e-4


@pytest.mark.parametrize("value_dim", [4, 12])
@pytest.mark.parametrize("algorithm", [RING, ULYSSES, GATHERED])
def test_values_of_another_head_size_travel_in_the_same_messages(algorithm, value_dim):
    """One message carries keys of 8 features and values of fewer or more; ranks of 4 share 2 key-value heads."""
    for error, forward, backward, sent in run_ranks(4, compare, algorithm, "documents", value_dim, backend="late"):
        assert error < 1e-12
        launches = [event for event in (*forward, *backward) if event.endswith("^")]
        assert len(launches) == {RING: 9, ULYSSES: 4, GATHERED: 3}[algorithm]
        rows, element = SAMPLES * LENGTH // 4, 8
        column = GROUPS * (SIZE + value_dim) * element
        if algorithm == RING:
            assert sent == {("cp", "send"): 9 * rows * column}
        elif algorithm == GATHERED:
            assert sent == {("cp", "all_gather"): 2 * 3 * rows * column, ("cp", "reduce_scatter"): 3 * rows * column}
        else:  # two key-value heads are sent to two ranks each
            features = (HEADS + 2 * GROUPS) * SIZE + (HEADS + 2 * GROUPS) * value_dim
            assert sent == {("cp", "all_to_all"): 2 * rows * features * element * 3 // 4}


def test_a_ring_passes_a_block_on_before_it_is_used():
    """cp 4, as drawn in ``core.context_parallel.ring``: what flies at the end of a step is waited for in the next."""
    for _, forward, backward, sent in run_ranks(4, compare, RING, "causal"):
        assert forward == ["send ^", "send v", "send ^", "send v", "send ^", "send v"]
        keys, gradients = ["send v", "send ^"], ["send v", "send ^"]
        assert backward == ["send ^", *keys, "send ^", *keys, *gradients, "send v", *gradients, "send v"]
        block = 2 * SAMPLES * LENGTH // 4 * GROUPS * SIZE * 8  # keys and values in fp64
        assert sent == {("cp", "send"): 3 * block * 3}


def test_gathered_keys_and_dealt_heads_launch_once_each_way():
    block = 2 * SAMPLES * LENGTH // 2 * GROUPS * SIZE * 8
    for _, forward, backward, sent in run_ranks(2, compare, GATHERED, "causal"):
        assert Counter(forward) == {"all_gather ^": 1, "all_gather v": 1}
        assert backward == ["all_gather ^", "all_gather v", "reduce_scatter ^", "reduce_scatter v"]
        assert sent == {("cp", "all_gather"): 2 * block, ("cp", "reduce_scatter"): block}
    for _, forward, backward, sent in run_ranks(2, compare, ULYSSES, "causal"):
        assert forward == backward == ["all_to_all ^", "all_to_all v"] * 2
        heads = SAMPLES * LENGTH // 2 * SIZE * 8
        assert sent == {("cp", "all_to_all"): 2 * (2 * HEADS + 2 * GROUPS) * heads // 2}
