"""Whole models whose sequences are shared by ranks: nobody sees what stands behind, or another document."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megapar.core.comm.axis import Axis
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.context_parallel.positions import GATHERED, RING, ULYSSES, choose_layout
from megapar.model.decoder.sizes import DecoderSizes
from megapar.moe.slicing import Slicing
from tests.model.small import DENSE, batch_for, build
from tests.support.ranks import run_ranks

LENGTH = 16
WAYS = [(RING, 1), (ULYSSES, 1), (GATHERED, 1), (RING, 2), (ULYSSES, 3), (GATHERED, 4)]
GROWING = (3, 9, 0, 5)  # windows of layers


def logits(model, layout, rank, tokens, ends):
    """{position: logits} of this rank's positions."""
    own = layout.positions(LENGTH, rank)
    batch = {"tokens": tokens[:, own], "positions": torch.arange(LENGTH)[own][None]}
    if ends is not None:
        batch["ends"] = torch.tensor(ends)
    with torch.no_grad():
        x, *_ = model._run(batch, tokens.numel())
        y = model.lm_head.logits(x, model.tied_weight)
    return {at: y[0, place] for place, at in enumerate(own)}


def who_sees(rank, size, algorithm, ends, slices=1):
    """For each changed position, those of this rank's positions whose logits change."""
    axis = Axis("cp", size, rank, dist.group.WORLD, tuple(range(size)))
    layout = choose_layout(algorithm, size, causal=True, length=LENGTH, slices=slices)
    model = build(
        replace(DENSE, num_layers=3),
        dtype=torch.float64,
        cp=ContextParallel(axis, algorithm, layout),
        slicing=Slicing(slices),
    )
    tokens = torch.randint(67, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    before = logits(model, layout, rank, tokens, ends)
    seen = {}
    for changed in range(LENGTH):
        other = tokens.clone()
        other[0, changed] = (other[0, changed] + 1) % 67
        after = logits(model, layout, rank, other, ends)
        seen[changed] = {at for at in before if not torch.equal(before[at], after[at])}
    return seen


@pytest.mark.parametrize("ends", [None, (6, 7, 16)])
@pytest.mark.parametrize(("algorithm", "slices"), WAYS)
def test_a_position_reaches_itself_and_what_follows_in_its_document(algorithm, slices, ends):
    found = run_ranks(2, who_sees, algorithm, ends, slices)
    for changed in range(LENGTH):
        end = next(e for e in ends or (LENGTH,) if changed < e)
        assert found[0][changed] | found[1][changed] == set(range(changed, end))


def step(sizes, layout, rank, **options):
    """(loss, gradients by name) of this rank's positions, in layers with ``GROWING`` windows."""
    with patch.object(DecoderSizes, "window_at", lambda _, layer: GROWING[layer]):
        model, whole = build(sizes, dtype=torch.float64, **options), batch_for(sizes)
        own = layout.positions(LENGTH, rank)
        batch = {name: tensor[:, own] for name, tensor in whole.items()}
        loss = model(batch, whole["tokens"].numel()).sums["lm"]
    loss.backward()
    return float(loss.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}


def step_on_ranks(rank, size, sizes, algorithm, slices):
    axis = Axis("cp", size, rank, dist.group.WORLD, tuple(range(size)))
    layout = choose_layout(algorithm, size, causal=True, length=LENGTH, slices=slices)
    return step(sizes, layout, rank, cp=ContextParallel(axis, algorithm, layout), slicing=Slicing(slices))


@pytest.mark.parametrize(("algorithm", "slices"), WAYS)
def test_layers_have_windows_of_several_sizes(algorithm, slices):
    """What ranks exchange for a layer is what its own window needs."""
    sizes = replace(DENSE, num_layers=len(GROWING))
    loss, grads = step(sizes, choose_layout(RING, 1, causal=True, length=LENGTH, slices=1), 0)
    ranks = run_ranks(2, step_on_ranks, sizes, algorithm, slices)
    assert sum(own for own, _ in ranks) == pytest.approx(loss, rel=1e-12)
    for name, want in grads.items():
        got = sum(own[name] for _, own in ranks)
        assert float((got - want).abs().max()) <= 1e-10 * float(want.abs().max()), name
