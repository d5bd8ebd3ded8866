"""Who is kept of a micro-batch does not depend on how many slices it comes in, and room is made for all of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapar.core.context_parallel.share import Share
from megapar.moe.micro_batch import MicroBatchRouting
from megapar.moe.router import Router
from megapar.moe.sizes import DEEPSPEED_MOE, MEGATRON_MOE, MoeSizes
from megapar.moe.slicing import Slicing

HIDDEN, EXPERTS, BATCH, LENGTH = 4, 5, 2, 6


def decide(sizes, slicing, x, valid):
    """(kept [B, S, k], rooms with the pairs that they are for, statistics), slice by slice."""
    router = Router(sizes, dtype=torch.float64)
    router.weight.data.copy_(torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(1)))
    tokens = int(valid.sum())
    options = {"local_capacity": True, "tokens": tokens, "capacity": sizes.capacity(tokens)}
    routing = MicroBatchRouting(sizes, Share(), slicing, **options)
    kept, rooms = [], []
    for place in slicing.cut(LENGTH):
        part, ok = x[:, place], valid[:, place]
        answer = router(part.flatten(0, 1), ok.flatten(), BATCH)
        found = routing.keep(answer, ok.flatten(), BATCH, part.shape[1])
        rooms.append((routing.room(part[..., 0].numel(), even_splits=False, padded=True), int(found.sum())))
        kept.append(found.unflatten(0, (BATCH, -1)))
    return torch.cat(kept, dim=1), rooms, routing.stats()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 99),
    kind=st.sampled_from([MEGATRON_MOE, DEEPSPEED_MOE]),
    degree=st.sampled_from([2, 3, 6]),
    share=st.floats(0.2, 1.0),
)
def test_slices_keep_what_the_whole_keeps(seed, kind, degree, share):
    generator = torch.Generator().manual_seed(seed)
    sizes = MoeSizes(HIDDEN, 8, EXPERTS, 2, kind=kind, min_capacity=1, capacity_factor=0.7)
    x = torch.randn(BATCH, LENGTH, HIDDEN, dtype=torch.float64, generator=generator)
    valid = torch.rand(BATCH, LENGTH, generator=generator) < share
    whole, rooms, wanted = decide(sizes, Slicing(), x, valid)
    kept, rooms_of_slices, stats = decide(sizes, Slicing(degree), x, valid)
    assert torch.equal(kept, whole)
    for (rows, exact), pairs in (*rooms, *rooms_of_slices):
        assert rows == pairs if exact else rows >= pairs
    assert int(stats.dropped) == int(wanted.dropped) == 2 * int(valid.sum()) - int(kept.sum())
    assert torch.equal(stats.load, wanted.load)
    torch.testing.assert_close((stats.aux, stats.z), (wanted.aux, wanted.z))


@pytest.mark.parametrize("slicing", [Slicing(), Slicing(2, capacity="slice")])
def test_even_splits_make_room_for_the_capacity_of_all_positions(slicing):
    """Padding too, because it differs between ranks and the splits may not."""
    sizes = MoeSizes(HIDDEN, 8, EXPERTS, 2, kind=DEEPSPEED_MOE, capacity_scope="rank")
    routing = MicroBatchRouting(sizes, Share(), slicing, local_capacity=True, tokens=3, capacity=sizes.capacity(3))
    assert routing.room(20, even_splits=True, padded=True) == (EXPERTS * sizes.capacity(20), False)
