"""Whole models cut over mp against one rank, with and without sequence parallelism: losses and every gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megapar.core.comm.axis import Axis
from megapar.core.sharding.cut import box_at
from megapar.model.spec import table_of
from tests.model.small import DENSE, ERNIE, MULTIPLIED, OLMO2, VARIETIES, batch_for, build
from tests.support.ranks import run_ranks

MODELS = {
    "rope, qk-norm, biases": replace(DENSE, qk_norm=True, add_bias_linear=True),
    "OLMo 2": replace(DENSE, num_attention_heads=6, **OLMO2),
    "multipliers": replace(DENSE, tie_embeddings=False, **MULTIPLIED),
    "gpt, untied": replace(VARIETIES["gpt"], tie_embeddings=False),
    "latent attention": VARIETIES["latent attention"],
    "ernie": ERNIE,
}


def step(sizes, mp, sequence_parallel):
    """(sums, gradients by name, first row of logits) of one batch."""
    model = build(sizes, dtype=torch.float64, mp=mp, sequence_parallel=sequence_parallel)
    batch = batch_for(sizes, padded=True)
    sums = model(batch).sums
    sum(sums.values()).backward()
    with torch.no_grad():
        logits = model.logits(batch)
    logits = logits[0] if isinstance(logits, tuple) else logits
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: float(value.detach()) for name, value in sums.items()}, grads, logits


def on_ranks(rank, world_size, sizes, sequence_parallel):
    mp = Axis("mp", world_size, rank, dist.group.WORLD, tuple(range(world_size)))
    sums, grads, logits = step(sizes, mp, sequence_parallel)
    for row in table_of(sizes):
        if row.mp_partial == "always" or (row.mp_partial == "sp" and sequence_parallel):
            dist.all_reduce(grads[row.name])
    return sums, grads, logits


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("sizes", MODELS.values(), ids=MODELS)
def test_two_ranks_equal_one(sizes, sequence_parallel):
    sums, grads, logits = step(sizes, Axis.single("mp"), False)
    results = run_ranks(2, on_ranks, sizes, sequence_parallel)
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for rank, (rank_sums, rank_grads, rank_logits) in enumerate(results):
        assert rank_sums == pytest.approx(sums, rel=1e-12)
        assert torch.allclose(rank_logits, logits, rtol=0, atol=1e-12)
        for row in table_of(sizes):
            expected = grads[row.name][box_at(row, {"mp": (2, rank)}).slices]
            difference = float((rank_grads[row.name] - expected).abs().max())
            assert difference <= 1e-9 * max(float(expected.abs().max()), 1e-6 * largest), row.name
