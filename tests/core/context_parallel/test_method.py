"""The three algorithms on ranks: attention of the whole, and nothing is in flight afterwards."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from megapar.core.attention_mask import AttentionMask
from megapar.core.comm.axis import Axis
from megapar.core.comm.comm_bytes import CommBytes
from megapar.core.comm.in_flight import CommContext
from megapar.core.context_parallel.blockwise import attend_blockwise
from megapar.core.context_parallel.heads import to_heads, to_positions
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.context_parallel.positions import GATHERED, RING, ULYSSES, choose_layout
from tests.support.attention import plain_attention_of
from tests.support.ranks import run_ranks

SAMPLES, LENGTH, HEADS, GROUPS, SIZE = 2, 16, 4, 2, 8
ENDS = (7, 16, 16 + 3, 32)


class RecordedTraffic(CommContext):
    """Notes launches and waits, and who is in flight while tiles are computed."""

    def __init__(self):
        super().__init__()
        self.order = []

    def launch(self, exchange, x, aside=False):
        self.order.append(f"{exchange.kind} ^")
        return super().launch(exchange, x, aside)

    def wait(self, flight, metered=True):
        self.order.append(f"{flight.exchange.kind} v")
        return super().wait(flight, metered)


def draw(value_dim=SIZE):
    generator = torch.Generator().manual_seed(5)
    heads = ((HEADS, SIZE), (GROUPS, SIZE), (GROUPS, value_dim))
    return [torch.randn(SAMPLES, LENGTH, n, size, generator=generator, dtype=torch.float64) for n, size in heads]


def attend(method, q, k, v, causal, ends):
    """q, k, v [B, S/cp, heads, D] of this rank to y of the same."""
    mask = AttentionMask.of(SAMPLES, LENGTH, causal=causal, ends=ends)
    if method.deals_heads:
        q, k, v = (x.transpose(1, 2) for x in to_heads(q, k, v, method.axis, method.comm))
        return to_positions(plain_attention_of(mask, q, k, v).transpose(1, 2), method.axis, method.comm)
    plan = method.plan(mask)
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    return attend_blockwise(*heads, method.transport, plan, flash=False).transpose(1, 2)


def whole(causal, ends, value_dim=SIZE):
    q, k, v = (x.requires_grad_() for x in draw(value_dim))
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    y = plain_attention_of(AttentionMask.of(SAMPLES, LENGTH, causal=causal, ends=ends), *heads).transpose(1, 2)
    return y, torch.autograd.grad(y.square().sum(), (q, k, v))


def compare(rank, size, algorithm, causal, ends, value_dim=SIZE):
    """(worst error, launches and waits of forward and backward, bytes sent)."""
    layout = choose_layout(algorithm, size, causal=causal, length=LENGTH)
    sent_bytes, comm = CommBytes(), RecordedTraffic()
    axis = Axis("cp", size, rank, dist.group.WORLD, tuple(range(size)), sent_bytes)
    method = ContextParallel(axis, algorithm, layout, comm)
    own = layout.positions(LENGTH, rank)
    q, k, v = (x[:, own].requires_grad_() for x in draw(value_dim))
    y = attend(method, q, k, v, causal, ends)
    forward = list(comm.order)
    grads = torch.autograd.grad(y.square().sum(), (q, k, v))
    comm.check_settled()
    want, want_grads = whole(causal, ends, value_dim)
    pairs = zip((y, *grads), (want, *want_grads), strict=True)
    error = max(float((a - b[:, own]).abs().max().detach()) for a, b in pairs)
    return error, forward, comm.order[len(forward) :], dict(sent_bytes)


@pytest.mark.parametrize("algorithm", [RING, ULYSSES, GATHERED])
@pytest.mark.parametrize(("size", "causal", "ends"), [(2, True, None), (2, False, None), (4, True, ENDS)])
def test_shared_attention_is_that_of_one_process(algorithm, size, causal, ends):
    for error, *_ in run_ranks(size, compare, algorithm, causal, ends, backend="late"):
        assert error < 1e-12


@pytest.mark.parametrize("value_dim", [4, 12])
@pytest.mark.parametrize("algorithm", [RING, ULYSSES, GATHERED])
def test_values_of_another_head_size_travel_in_the_same_messages(algorithm, value_dim):
    """One message carries keys of 8 features and values of fewer or more; ranks of 4 share 2 key-value heads."""
    for error, forward, backward, sent in run_ranks(4, compare, algorithm, True, ENDS, value_dim, backend="late"):
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
    for _, forward, backward, sent in run_ranks(4, compare, RING, True, None):
        assert forward == ["send ^", "send v", "send ^", "send v", "send ^", "send v"]
        keys, gradients = ["send v", "send ^"], ["send v", "send ^"]
        assert backward == ["send ^", *keys, "send ^", *keys, *gradients, "send v", *gradients, "send v"]
        block = 2 * SAMPLES * LENGTH // 4 * GROUPS * SIZE * 8  # keys and values in fp64
        assert sent == {("cp", "send"): 3 * block * 3}


def test_gathered_keys_and_dealt_heads_launch_once_each_way():
    block = 2 * SAMPLES * LENGTH // 2 * GROUPS * SIZE * 8
    for _, forward, backward, sent in run_ranks(2, compare, GATHERED, True, None):
        assert Counter(forward) == {"all_gather ^": 1, "all_gather v": 1}
        assert backward == ["all_gather ^", "all_gather v", "reduce_scatter ^", "reduce_scatter v"]
        assert sent == {("cp", "all_gather"): 2 * block, ("cp", "reduce_scatter"): block}
    for _, forward, backward, sent in run_ranks(2, compare, ULYSSES, True, None):
        assert forward == backward == ["all_to_all ^", "all_to_all v"] * 2
        heads = SAMPLES * LENGTH // 2 * SIZE * 8
        assert sent == {("cp", "all_to_all"): 2 * (2 * HEADS + 2 * GROUPS) * heads // 2}
