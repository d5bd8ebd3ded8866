"""Digests: every flipped bit shows, and where it is; parts that take turns have every element once."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megapar.core.device.base import Device
from megapar.core.optimizer.offload import OffloadedOptimizer
from megapar.core.optimizer.optimizer import Optimizer
from megapar.core.optimizer.update_rule import AdamW
from megapar.core.sharding.master_shard import MasterShard
from megapar.health.corruption.state_digest import (
    BLOCK,
    InPlaceDigest,
    OffloadedDigest,
    digest_tensors,
    places,
    rotation,
)

# Without a whole block, of whole blocks alone, of both, and odd ones.
SIZES = (1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 13)


def flip(flat: Tensor, element: int, bit: int) -> None:
    words = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    words[element] ^= 1 << bit if bit < 8 * flat.element_size() - 1 else -(1 << bit)


@pytest.mark.parametrize(
    ("dtype", "offset"),
    [*((dtype, n) for dtype in (torch.float32, torch.float64) for n in (0, 1)), (torch.bfloat16, 0)],
)
def test_every_flipped_bit_shows_and_where_it_is(dtype: torch.dtype, offset: int) -> None:
    torch.manual_seed(1)
    storages = [torch.randn(size + offset + size % 2, dtype=dtype) for size in SIZES]
    tensors = [storage[offset : offset + size] for storage, size in zip(storages, SIZES, strict=True)]
    clean, draw = digest_tensors(tensors), random.Random(1)
    assert torch.equal(digest_tensors(tensors), clean)
    for tensor in tensors:
        size = tensor.element_size()
        for element in {0, tensor.numel() - 1, *(draw.randrange(tensor.numel()) for _ in range(20))}:
            for bit in (0, 8 * size - 1, draw.randrange(8 * size)):
                flip(tensor, element, bit)
                different = digest_tensors(tensors) != clean
                flip(tensor, element, bit)
                address = tensor.data_ptr() + element * size
                (place,) = {
                    place
                    for place in places(tensors, different, tensors)
                    if place[0] < address + size and place[1] > address
                }
                assert place[1] - place[0] <= 4 * BLOCK
    assert torch.equal(digest_tensors(tensors), clean)


def test_blocks_that_change_places_show() -> None:
    flat = torch.randn(4 * BLOCK)
    clean = digest_tensors([flat])
    rows = flat.view(4, BLOCK)
    rows[[0, 2]] = rows[[2, 0]].clone()
    assert (digest_tensors([flat]) != clean).any()


def test_bits_are_compared_not_numbers() -> None:
    flat = torch.zeros(8)
    clean = digest_tensors([flat])
    flat[3] = -0.0
    assert (digest_tensors([flat]) != clean).any()
    flat.fill_(torch.nan)
    assert torch.equal(digest_tensors([flat]), digest_tensors([flat]))


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 100])
def test_a_turn_has_every_element_once(steps: int) -> None:
    groups = rotation(SIZES, steps)
    assert len(groups) == steps
    seen = [torch.zeros(size, dtype=torch.int64) for size in SIZES]
    for group in groups:
        for piece in group:
            seen[piece.tensor][piece.start : piece.end] += 1
    assert all(bool((one == 1).all()) for one in seen)


def test_parts_of_large_tensors_are_even() -> None:
    groups = rotation([10 * BLOCK, 1000 * BLOCK, 3], 4)
    sizes = [sum(piece.end - piece.start for piece in group) for group in groups]
    assert max(sizes) - min(sizes) <= 2 * BLOCK


def test_a_change_is_seen_when_its_part_has_its_turn() -> None:
    tensors = [torch.randn(2 * BLOCK) for _ in range(3)]
    resting = InPlaceDigest(tensors, 3)
    assert resting.compare() is None
    heard = []
    for _ in range(6):
        resting.digest_next()
        flip(tensors[1], 5, 3)
        found = resting.compare()
        assert found is not None
        heard.append(bool(found))
    assert heard == [False, True, False, False, True, False]
    (place,) = resting.changed()
    assert place == (tensors[1].data_ptr(), tensors[1].data_ptr() + 4 * BLOCK)


def test_fewer_parts_than_updates_leave_updates_out() -> None:
    tensors = [torch.randn(2 * BLOCK) for _ in range(3)]
    resting = InPlaceDigest(tensors, 5, parts=2)
    heard = []
    for _ in range(10):
        resting.digest_next()
        flip(tensors[0], 5, 3)
        flip(tensors[2], 5, 3)
        found = resting.compare()
        heard.append(None if found is None else bool(found))
    assert heard == [True, None, True, None, None] * 2
    assert {first for first, _ in resting.changed()} == {tensors[0].data_ptr(), tensors[2].data_ptr()}


def make_shards(sizes: Sequence[int]) -> list[MasterShard]:
    torch.manual_seed(2)
    # Pieces of one storage, of which some begin at an odd place.
    master = torch.randn(sum(sizes))
    return [MasterShard(flat, torch.randn(flat.numel()), True, True) for flat in master.split(list(sizes))]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", ["master", "exp_avg", "exp_avg_sq"])
def test_what_lies_in_host_memory_is_compared_as_it_comes(steps: int, name: str) -> None:
    shards = make_shards((7, 3 * BLOCK + 5, BLOCK, 9))
    optimizer = OffloadedOptimizer(shards, Device(), AdamW((0.9, 0.95), 1e-8, 0.1))
    moments = map(optimizer.state, ("exp_avg", "exp_avg_sq"))
    homes = list(zip([shard.master for shard in shards], *moments, strict=True))
    visiting = optimizer.seen_by = OffloadedDigest(homes, steps, optimizer.visit)
    for _ in range(3):
        optimizer.step(1e-3)
        visiting.digest_next()
        found = visiting.compare()
        assert found is None or not found
    victim = homes[1][("master", "exp_avg", "exp_avg_sq").index(name)]
    heard, before = [], victim[11].clone()
    for _ in range(steps):
        flip(victim, 11, 3)
        visiting.compare_now()  # as before a save
        optimizer.step(1e-3)
        visiting.digest_next()
        found = visiting.compare()
        assert found is not None
        heard.append(bool(found))
    assert not torch.equal(victim[11], before)
    assert heard.count(True) == 1
    address = victim.data_ptr() + 44
    assert all(first <= address < end for first, end in visiting.changed())
    assert visiting.changed()


def test_looking_changes_nothing() -> None:
    sizes = (7, 3 * BLOCK + 5, BLOCK)
    offloaded, plain = make_shards(sizes), make_shards(sizes)
    numbers = AdamW((0.9, 0.95), 1e-8, 0.1)
    optimizer, other = OffloadedOptimizer(offloaded, Device(), numbers), Optimizer(plain, numbers)
    homes = [(shard.master,) for shard in offloaded]
    optimizer.seen_by = OffloadedDigest(homes, 1, optimizer.visit)
    for _ in range(3):
        optimizer.step(1e-2)
        optimizer.seen_by.digest_next()
        optimizer.visit()
        other.step(1e-2)
    for one, two in zip(offloaded, plain, strict=True):
        assert torch.equal(one.master, two.master)
