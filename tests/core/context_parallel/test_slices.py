"""Attention slice by slice on ranks that share every slice: attention of the whole, and when what is launched."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from megapar.core.comm.in_flight import CommContext
from megapar.core.context_parallel.positions import GATHERED, RING
from megapar.core.context_parallel.slices import SharedSlices
from tests.core.context_parallel.test_method import LENGTH, MASKS, SIZE, attend, compare, draw, make, whole, worst
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("algorithm", [RING, GATHERED])
@pytest.mark.parametrize(
    ("size", "slices", "name", "value_dim"),
    [
        *((2, 2, "causal", SIZE), (2, 3, "documents", SIZE), (4, 4, "documents", SIZE), (4, 2, "causal", SIZE)),
        *((2, 3, "documents", value_dim) for value_dim in (4, 12)),
    ],
)
def test_shared_slices_are_attention_of_one_process(algorithm, size, slices, name, value_dim):
    for error, *_ in run_ranks(size, compare, algorithm, name, value_dim, slices, backend="late"):
        assert error < 1e-12


def test_keys_of_a_slice_travel_once_and_their_gradients_once():
    for _, forward, backward, _ in run_ranks(2, compare, GATHERED, "causal", SIZE, 3):
        assert forward == ["all_gather ^", "all_gather v"] * 3
        assert backward == ["reduce_scatter ^", "reduce_scatter v"] * 3
    # A ring of three hops: the next block is on its way before one is used.
    for _, forward, backward, _ in run_ranks(4, compare, RING, "causal", SIZE, 2):
        assert forward == ["send ^", "send v", "send ^", "send v", "send ^", "send v"] * 2
        assert backward == ["send ^", "send v", "send ^", "send v", "send ^", "send v"] * 2


def freed(rank, size, algorithm):
    """(the columns of a finished layer are freed, those of a recomputed unit between its two forwards, worst error)."""
    method = make(rank, size, algorithm, CommContext(), slices=3)
    own = method.layout.positions(LENGTH, rank)
    q, k, v = (x[:, own].requires_grad_() for x in draw())
    plans = method.slice_plans(MASKS["causal"])
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
    want_grads = whole(MASKS["causal"], draw())[1]
    return ended, between, worst(grads, [x[:, own] for x in want_grads])


@pytest.mark.parametrize("algorithm", [RING, GATHERED])
def test_columns_are_freed_without_the_collector_of_cycles(algorithm):
    for ended, between, error in run_ranks(2, freed, algorithm):
        assert ended
        assert between
        assert error < 1e-12


def dropped(rank, size, algorithm, slices):
    """(mean of y, sum of y^2, sum of v's gradient of it) where v is one everywhere: y is the sum of kept weights."""
    torch.manual_seed(rank)
    method = make(rank, size, algorithm, CommContext(), slices=slices)
    own = method.layout.positions(LENGTH, rank)
    q, k, v = (x[:, own].requires_grad_() for x in draw())
    v = torch.ones_like(v).requires_grad_()
    y = attend(method, q, k, v, MASKS["causal"], dropout=0.4)
    (dv,) = torch.autograd.grad(y.square().sum(), (v,))
    return float(y.mean().detach()), float(y.square().sum().detach()), float(dv.sum())


@pytest.mark.parametrize("algorithm", [RING, GATHERED])
@pytest.mark.parametrize("slices", [1, 3])
def test_dropout_keeps_the_mean_and_repeats_in_the_backward(algorithm, slices):
    means, squares, gradients = zip(*run_ranks(2, dropped, algorithm, slices), strict=True)
    assert sum(means) / 2 == pytest.approx(1.0, abs=0.05)
    assert sum(gradients) == pytest.approx(2 * sum(squares))
