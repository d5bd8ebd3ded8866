"""Latent attention on ranks that share a sequence is that of one process, whatever they send of keys and values."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from megapar.core.comm.axis import Axis
from megapar.core.comm.in_flight import CommContext
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.context_parallel.positions import GATHERED, RING, ULYSSES, choose_layout
from megapar.core.tensor_parallel.execution import Execution
from megapar.core.tensor_parallel.weight_gradients import WeightGradients
from megapar.model.layers.context import Context
from tests.model.attention.test_latent_layer import BATCH, ENDS, LENGTH, ROPE, SPLIT, alone, inputs, latent_sizes, layer
from tests.support.attention import causal_mask, sliced
from tests.support.pairwise import pairwise
from tests.support.ranks import run_ranks


def axes(rank, size, cp_size):
    """cp of ``cp_size`` neighbours, and mp of the rest."""
    groups = [[first + mp for first in range(0, size, size // cp_size)] for mp in range(size // cp_size)]
    cp = [dist.new_group(group, backend=dist.get_backend()) for group in groups]
    width = size // cp_size
    others = [list(range(first, first + width)) for first in range(0, size, width)]
    mp = [dist.new_group(group, backend=dist.get_backend()) for group in others]
    at, row = rank % width, rank // width
    return (
        Axis("cp", cp_size, row, cp[at], tuple(groups[at])),
        Axis("mp", width, at, mp[row], tuple(others[row])),
    )


def run_layer(attention, x, angles, layout, slices, ends, prepared):
    """y [B, S/cp(/mp), H] of this rank's positions."""
    cp = attention.cp
    mask = causal_mask(BATCH, LENGTH, ends)
    if slices == 1:
        return attention(x, Context(mask, None, BATCH * LENGTH, {ROPE: angles}, plan=cp.plan(mask.host)))
    runs = layout.runs(LENGTH, cp.axis.rank)
    cuts = [0]
    for run in runs:
        cuts.append(cuts[-1] + len(run))
    own = tuple(slice(a, b) for a, b in itertools.pairwise(cuts))
    whole = tuple(slice(cp.axis.size * a, cp.axis.size * b) for a, b in itertools.pairwise(cuts))
    context = Context(
        mask,
        None,
        BATCH * LENGTH,
        {ROPE: angles},
        slices=own,
        own_slices=own,
        whole_slices=whole,
        slice_plans=cp.slice_plans(mask.host),
    )
    return sliced(attention, x, context, prepared=prepared)


def compare(rank, size, cp_size, algorithm, latents, options):
    """Return the worst error of y and of every gradient."""
    options = {"slices": 1, "ends": None, "sp": False, "dtype": torch.float64, "prepared": False} | options
    dtype, sp, ends, slices = options["dtype"], options["sp"], options["ends"], options["slices"]
    sizes = latent_sizes(query_rank=options.get("query_rank", 18), flash=dtype != torch.float64)
    comm, later = CommContext(), WeightGradients()
    cp_axis, mp = axes(rank, size, cp_size)
    layout = choose_layout(algorithm, cp_size, causal=True, length=LENGTH, slices=slices)
    cp = ContextParallel(cp_axis, algorithm, layout, comm, latents=latents)
    execution = Execution(comm=comm, weight_gradients=later if options.get("defers") else None)
    attention = layer(sizes, dtype, mp=mp, sp=sp, execution=execution, cp=cp)
    x, angles, upstream = inputs(sizes, dtype)
    own = torch.tensor(layout.positions(LENGTH, cp_axis.rank))
    held = own.chunk(mp.size)[mp.rank] if sp else own
    mine = x.detach()[:, held].requires_grad_()
    own_angles = tuple(part[:, own] for part in angles)
    y = run_layer(attention, mine, own_angles, layout, slices, ends, options["prepared"])
    with later.keep("all"):
        y.backward(upstream[:, held])
    assert (attention.kv_up.weight.grad is None) == bool(options.get("defers"))
    later.run("all")
    comm.check_settled()
    want, wants = alone(sizes, ends)
    pairs = [(y, want[:, held]), (mine.grad, wants.pop("x")[:, held])]
    for name, parameter in attention.named_parameters():
        grad, whole = parameter.grad.double(), wants[name]
        dist.all_reduce(grad, group=cp_axis.group)
        if sp and name not in SPLIT:
            dist.all_reduce(grad, group=mp.group)
        pairs.append((grad, whole if name not in SPLIT else whole.chunk(mp.size, SPLIT[name])[mp.rank]))
    return max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in pairs)


BY_LATENTS = (
    {},
    {"slices": 2, "ends": ENDS, "defers": True},
    {"slices": 3, "prepared": True},
    {"query_rank": 0, "ends": ENDS, "defers": True},
)
BY_KEYS_AND_VALUES = [{"slices": slices, "ends": ends, "prepared": True} for slices in (1, 2) for ends in (None, ENDS)]


@pytest.mark.parametrize("algorithm", [RING, GATHERED, ULYSSES])
@pytest.mark.parametrize(
    ("latents", "options"), [*((True, row) for row in BY_LATENTS), *((False, row) for row in BY_KEYS_AND_VALUES)]
)
def test_two_ranks_share_a_sequence(algorithm, latents, options):
    assert max(run_ranks(2, compare, 2, algorithm, latents, options, backend="late")) < 1e-11


CUT = {"sp": {"sp": True}, "slices": {"query_rank": 0, "ends": ENDS, "slices": 2}}
CUT_FACTORS = ((RING, GATHERED, ULYSSES), (True, False), tuple(CUT))
EVERY_PAIR = pairwise(CUT_FACTORS)


@pytest.mark.parametrize(
    ("algorithm", "latents", "options"),
    [
        pytest.param(*row, marks=[] if row in EVERY_PAIR else [pytest.mark.table])
        for row in itertools.product(*CUT_FACTORS)
    ],
)
def test_heads_are_cut_over_mp(algorithm, latents, options):
    assert max(run_ranks(4, compare, 2, algorithm, latents, CUT[options], backend="late")) < 1e-11
