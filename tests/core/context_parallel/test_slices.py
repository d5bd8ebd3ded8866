"""Attention slice by slice on ranks that share every slice: attention of the whole, and when what is launched."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from megapar.core.attention_mask import AttentionMask
from megapar.core.comm.axis import Axis
from megapar.core.comm.in_flight import CommContext
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.context_parallel.positions import GATHERED, RING, choose_layout
from megapar.core.context_parallel.slices import SharedSlices
from tests.core.context_parallel.test_method import ENDS, LENGTH, SIZE, RecordedTraffic, draw, whole
from tests.support.ranks import run_ranks


def make(rank, size, algorithm, slices, comm):
    layout = choose_layout(algorithm, size, causal=True, length=LENGTH, slices=slices, balanced=slices == 3)
    axis = Axis("cp", size, rank, dist.group.WORLD, tuple(range(size)))
    return ContextParallel(axis, algorithm, layout, comm)


def attend(method, q, k, v, ends, dropout=0.0):
    """q, k, v [B, S/cp, heads, D] of this rank to y of the same."""
    plans = method.slice_plans(AttentionMask.of(q.shape[0], LENGTH, causal=True, ends=ends))
    shared = SharedSlices(method.axis, method.slice_transport, plans, flash=False)
    lengths = [len(plan.runs[method.axis.rank]) for plan in plans]
    heads = zip(*(x.transpose(1, 2).split(lengths, dim=2) for x in (q, k, v)), strict=True)
    parts = [shared.attend(*slice_heads, number, dropout) for number, slice_heads in enumerate(heads)]
    assert shared.gradients is None
    return torch.cat(parts, dim=2).transpose(1, 2)


def compare(rank, size, algorithm, slices, ends, value_dim=SIZE):
    """(worst error, launches and waits of forward and backward)."""
    comm = RecordedTraffic()
    method = make(rank, size, algorithm, slices, comm)
    own = method.layout.positions(LENGTH, rank)
    q, k, v = (x[:, own].requires_grad_() for x in draw(value_dim))
    y = attend(method, q, k, v, ends)
    forward = list(comm.order)
    grads = torch.autograd.grad(y.square().sum(), (q, k, v))
    comm.check_settled()
    want, want_grads = whole(True, ends, value_dim)
    pairs = zip((y, *grads), (want, *want_grads), strict=True)
    error = max(float((a - b[:, own]).abs().max().detach()) for a, b in pairs)
    return error, forward, comm.order[len(forward) :]


@pytest.mark.parametrize("algorithm", [RING, GATHERED])
@pytest.mark.parametrize(("size", "slices", "ends"), [(2, 2, None), (2, 3, ENDS), (4, 4, ENDS), (4, 2, None)])
def test_shared_slices_are_attention_of_one_process(algorithm, size, slices, ends):
    for error, *_ in run_ranks(size, compare, algorithm, slices, ends, backend="late"):
        assert error < 1e-12


@pytest.mark.parametrize("value_dim", [4, 12])
@pytest.mark.parametrize("algorithm", [RING, GATHERED])
def test_values_of_another_head_size(algorithm, value_dim):
    for error, *_ in run_ranks(2, compare, algorithm, 3, ENDS, value_dim, backend="late"):
        assert error < 1e-12


def test_keys_of_a_slice_travel_once_and_their_gradients_once():
    for _, forward, backward in run_ranks(2, compare, GATHERED, 3, None):
        assert forward == ["all_gather ^", "all_gather v"] * 3
        assert backward == ["reduce_scatter ^", "reduce_scatter v"] * 3
    # A ring of three hops: the next block is on its way before one is used.
    for _, forward, backward in run_ranks(4, compare, RING, 2, None):
        assert forward == ["send ^", "send v", "send ^", "send v", "send ^", "send v"] * 2
        assert backward == ["send ^", "send v", "send ^", "send v", "send ^", "send v"] * 2


def freed(rank, size, algorithm):
    """(the columns of a finished layer are freed, those of a recomputed unit between its two forwards, worst error)."""
    method = make(rank, size, algorithm, 3, CommContext())
    own = method.layout.positions(LENGTH, rank)
    q, k, v = (x[:, own].requires_grad_() for x in draw())
    plans = method.slice_plans(AttentionMask.of(q.shape[0], LENGTH, causal=True))
    lengths = [len(plan.runs[method.axis.rank]) for plan in plans]

    def forward(shared):
        heads = zip(*(x.transpose(1, 2).split(lengths, dim=2) for x in (q, k, v)), strict=True)
        parts = [shared.attend(*slice_heads, number, 0.0) for number, slice_heads in enumerate(heads)]
        return torch.cat(parts, dim=2).transpose(1, 2)

    def columns(shared):
        return weakref.ref(shared.columns.message.untyped_storage())

    gc.disable()  # freed at once, not by the collector of cycles
    try:
        shared = SharedSlices(method.axis, method.slice_transport, plans, flash=False)
        y = forward(shared)
        kept = columns(shared)
        torch.autograd.grad(y.sum(), (q, k, v))
        del y, shared
        unit = SharedSlices(method.axis, method.slice_transport, plans, flash=False)
        y = forward(unit)
        first = columns(unit)
        unit.drop_columns()
        between = first() is None
        forward(unit)  # the recomputation
        grads = torch.autograd.grad(y.square().sum(), (q, k, v))
        ended = kept() is None and unit.columns is None
    finally:
        gc.enable()
    want_grads = whole(True, None)[1]
    error = max(float((a - b[:, own]).abs().max()) for a, b in zip(grads, want_grads, strict=True))
    return ended, between, error


@pytest.mark.parametrize("algorithm", [RING, GATHERED])
def test_columns_are_freed_without_the_collector_of_cycles(algorithm):
    for ended, between, error in run_ranks(2, freed, algorithm):
        assert ended
        assert between
        assert error < 1e-12


def dropped(rank, size, algorithm):
    """(sum of y^2, sum of v's gradient of it) where v is one everywhere, so that y is the sum of the kept weights."""
    torch.manual_seed(rank)
    method = make(rank, size, algorithm, 3, CommContext())
    own = method.layout.positions(LENGTH, rank)
    q, k, v = (x[:, own].requires_grad_() for x in draw())
    v = torch.ones_like(v).requires_grad_()
    y = attend(method, q, k, v, None, dropout=0.4)
    (dv,) = torch.autograd.grad(y.square().sum(), (v,))
    return float(y.square().sum().detach()), float(dv.sum())


@pytest.mark.parametrize("algorithm", [RING, GATHERED])
def test_dropout_repeats_in_the_backward(algorithm):
    squares, gradients = zip(*run_ranks(2, dropped, algorithm), strict=True)
    assert sum(gradients) == pytest.approx(2 * sum(squares))
