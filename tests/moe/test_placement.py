"""Placements: every expert once, equal numbers, classes kept, and less load on the busiest rank."""

from __future__ import annotations

import random

import pytest

from megapar.moe.placement import PlacementRoom, busiest_rank, in_order, rebalanced, slots_of

ROOMS = [
    PlacementRoom(8, 2, 2, 4),
    PlacementRoom(16, 4, 4, 4),
    PlacementRoom(16, 4, 2, 4),
    PlacementRoom(16, 4, 4, 2),
    PlacementRoom(24, 4, 2, 1),
    PlacementRoom(64, 8, 4, 8),
]


def drawn(room: PlacementRoom, seed: int) -> tuple[list[int], tuple[int, ...]]:
    """Skewed loads, and a placement that some earlier loads led to."""
    draw = random.Random(seed)
    loads = [[int(1000 * draw.random() ** 6) for _ in range(room.experts)] for _ in range(2)]
    return loads[0], rebalanced(loads[1], in_order(room.experts), room)


def nodes(loads: list[int], experts: tuple[int, ...], room: PlacementRoom) -> float:
    return busiest_rank(loads, experts, room.ranks // room.node_ranks)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_a_new_placement_is_one_of_the_room_and_no_worse(room: PlacementRoom, seed: int) -> None:
    loads, before = drawn(room, seed)
    after = rebalanced(loads, before, room)
    assert room.fits(before)
    assert room.fits(after)
    assert nodes(loads, after, room) <= nodes(loads, before, room)
    if room.node_ranks == room.ranks:
        assert busiest_rank(loads, after, room.ranks) <= busiest_rank(loads, before, room.ranks)
    assert rebalanced(loads, after, room) == after


def test_a_skewed_load_becomes_even() -> None:
    loads = [100, 90, 80, 70, 10, 10, 10, 10, 1, 1, 1, 1, 1, 1, 1, 1]
    after = rebalanced(loads, in_order(16), PlacementRoom(16, 4, 4, 4))
    assert busiest_rank(loads, in_order(16), 4) > 3
    assert busiest_rank(loads, after, 4) < 1.15


def test_only_experts_that_a_swap_needs_move() -> None:
    assert rebalanced([90, 80, 10, 20], in_order(4), PlacementRoom(4, 2, 2, 2)) == (3, 1, 2, 0)


def test_a_small_gain_moves_nothing() -> None:
    assert rebalanced([101, 100, 100, 99], in_order(4), PlacementRoom(4, 2, 2, 2)) == in_order(4)


def test_without_load_nothing_moves() -> None:
    assert rebalanced([0] * 8, in_order(8), PlacementRoom(8, 2, 2, 4)) == in_order(8)
    assert busiest_rank([0] * 8, in_order(8), 2) == 1.0


def test_nodes_come_before_ranks() -> None:
    loads = [50, 50, 50, 50, 1, 1, 1, 1]
    after = rebalanced(loads, in_order(8), PlacementRoom(8, 4, 2, 2))
    assert busiest_rank(loads, after, 2) == 1.0
    assert busiest_rank(loads, after, 4) == 1.0


def test_experts_stay_in_the_block_of_their_number() -> None:
    room = PlacementRoom(8, 2, 2, 2)
    after = rebalanced([90, 80, 1, 1, 1, 1, 1, 1], in_order(8), room)
    assert after != in_order(8)
    assert room.fits(after)
    assert not room.fits((2, 1, 0, 3, 4, 5, 6, 7))
    assert not room.fits((0, 0, 2, 3, 4, 5, 6, 7))


def test_slots_are_the_inverse() -> None:
    assert slots_of((2, 0, 1)) == [1, 2, 0]
