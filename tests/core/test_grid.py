"""The four 32-GPU examples of PaddlePaddle PR 31884, and what every grid must hold."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapar.core.grid import DENSE_AXES, EXPERT_AXES, Grid


def blocks(length: int) -> tuple[tuple[int, ...], ...]:
    """The 32 ranks in consecutive groups of this length."""
    return tuple(tuple(range(first, first + length)) for first in range(0, 32, length))


def apart(step: int, length: int = 32) -> tuple[tuple[int, ...], ...]:
    """The ranks of each ``length`` in groups, of ranks that are ``step`` apart."""
    return tuple(tuple(range(at + first, at + length, step)) for at in range(0, 32, length) for first in range(step))


EXAMPLES = {
    "pure sharding": (Grid(sharding=32), 32, {"sharding": blocks(32), "mp": blocks(1), "dp": blocks(1)}),
    "sharding in a node, 4 replicas": (Grid(dp=4, sharding=8), 32, {"sharding": blocks(8), "dp": apart(8)}),
    "mp in a node, sharding over nodes": (
        Grid(sharding=4, mp=8),
        4,
        {"mp": blocks(8), "sharding": apart(8), "dp": blocks(1)},
    ),
    "mp 2 and sharding 4 in a node, 4 replicas": (
        Grid(dp=4, sharding=4, mp=2),
        16,
        {"mp": blocks(2), "sharding": apart(2, 8), "dp": apart(8)},
    ),
}


@pytest.mark.parametrize(("grid", "data_ranks", "groups"), EXAMPLES.values(), ids=EXAMPLES)
def test_the_examples_of_paddle(grid: Grid, data_ranks: int, groups: dict[str, tuple[tuple[int, ...], ...]]) -> None:
    assert {axis: grid.groups(axis) for axis in groups} == groups
    assert grid.data_ranks == data_ranks


def test_sharding_outermost_as_ernie_4_5_orders_it() -> None:
    grid = Grid(pp=2, sharding=2, order=("sharding", "pp", "dp", "cp", "mp"))
    assert grid.groups("pp") == ((0, 1), (2, 3))
    assert grid.groups("sharding") == ((0, 2), (1, 3))


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    dense = {axis: draw(st.integers(1, 3)) for axis in DENSE_AXES}
    order = tuple(draw(st.permutations(DENSE_AXES)))
    stage = dense["dp"] * dense["sharding"] * dense["cp"] * dense["mp"]
    emp = draw(st.sampled_from(sorted({1, dense["mp"]})))
    inner = dense["sharding"] * dense["cp"] * dense["mp"] // emp
    divides = [n for n in range(1, stage // emp + 1) if stage // emp % n == 0]
    ep = draw(st.sampled_from([n for n in divides if inner % n == 0 or n % inner == 0]))
    return Grid(**dense, ep=ep, emp=emp, order=order)


@settings(deadline=None, max_examples=60)
@given(grids())
def test_groups_of_each_axis_partition_the_world(grid: Grid) -> None:
    for axis in {*DENSE_AXES, *EXPERT_AXES}:
        groups = grid.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
        assert {len(group) for group in groups} == {grid.size(axis)}


@settings(deadline=None, max_examples=20)
@given(grids())
def test_two_axes_of_a_view_meet_in_at_most_one_rank(grid: Grid) -> None:
    """No two ranks have the same group on both."""
    for view in (DENSE_AXES, EXPERT_AXES):
        group_of = {
            axis: {rank: number for number, group in enumerate(grid.groups(axis)) for rank in group} for axis in view
        }
        for one, other in combinations(view, 2):
            crossings = {(group_of[one][rank], group_of[other][rank]) for rank in range(grid.world_size)}
            assert len(crossings) == grid.world_size


@settings(deadline=None, max_examples=60)
@given(grids())
def test_dense_rank_is_the_positional_number_of_its_coordinates(grid: Grid) -> None:
    for rank in range(grid.world_size):
        at = grid.dense(rank)
        number, weight = 0, 1
        for axis in reversed(grid.order):
            number += weight * at[axis]
            weight *= grid.size(axis)
        assert number == rank == grid.rank(**at)


@settings(deadline=None, max_examples=60)
@given(grids())
def test_expert_view_flattens_dp_sharding_cp_mp_whatever_the_order(grid: Grid) -> None:
    for rank in range(grid.world_size):
        at, expert = grid.dense(rank), grid.expert(rank)
        flat = at["mp"] + grid.mp * (at["cp"] + grid.cp * (at["sharding"] + grid.sharding * at["dp"]))
        assert expert["pp"] == at["pp"]
        assert flat == expert["emp"] + grid.emp * (expert["ep"] + grid.ep * expert["edp"])
        assert 0 <= expert["emp"] < grid.emp
        assert 0 <= expert["ep"] < grid.ep
        assert 0 <= expert["edp"] < grid.edp


@settings(deadline=None, max_examples=60)
@given(grids())
def test_a_rank_is_in_its_own_group_at_its_own_coordinate(grid: Grid) -> None:
    for rank in range(grid.world_size):
        at = grid.coordinates(rank)
        for axis in (*DENSE_AXES, *EXPERT_AXES[1:]):
            assert grid.group(axis, rank)[at[axis]] == rank


@settings(deadline=None, max_examples=40)
@given(grids())
def test_a_parameter_s_shards_and_replicas_meet_in_one_rank(grid: Grid) -> None:
    for rank in range(grid.world_size):
        dense = grid.shard_group(rank, expert=False), grid.replica_group(rank, expert=False)
        expert = grid.shard_group(rank, expert=True), grid.replica_group(rank, expert=True)
        for shards, replicas in (dense, expert):
            assert set(shards) & set(replicas) == {rank}
        assert len(dense[0]) * len(dense[1]) == grid.dp * grid.shards
        assert len(expert[0]) * len(expert[1]) == grid.edp
        assert all(grid.replica_group(rank, expert=True) == grid.replica_group(r, expert=True) for r in expert[1])


def test_combined_axes_run_the_last_one_fastest() -> None:
    grid = Grid(sharding=2, cp=2, mp=2)
    assert grid.group(("sharding", "cp"), 1) == (1, 3, 5, 7)
    assert grid.group(("cp", "sharding"), 1) == (1, 5, 3, 7)


def test_axes_of_two_views_have_no_common_group() -> None:
    with pytest.raises(ValueError, match="not of one view"):
        Grid(sharding=2, ep=2).group(("sharding", "ep"), 0)


@pytest.mark.parametrize(
    ("message", "sizes"),
    [
        ("at least one rank", {"dp": 0}),
        ("neither divides nor is a multiple", {"dp": 2, "sharding": 3, "ep": 2}),
        ("neither divides nor is a multiple", {"mp": 4, "emp": 3}),
        ("does not divide", {"sharding": 2, "ep": 4}),
        ("does not divide", {"sharding": 4, "ep": 8}),
        ("does not divide", {"mp": 2, "emp": 2, "ep": 2}),
        ("permutation", {"order": ("dp", "pp", "sharding", "cp", "tp")}),
        ("permutation", {"order": ("dp", "pp")}),
    ],
)
def test_sizes_that_make_no_grid_are_refused(message: str, sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        Grid(**sizes)


def node_ranks_one_by_one(grid: Grid, node: int) -> int | None:
    """The ranks of ep on each node, seen group by group."""
    counts: set[int | None] = set()
    for group in grid.groups("ep"):
        nodes = [rank // node for rank in group]
        local = nodes.count(nodes[0])
        chunks = [set(nodes[start : start + local]) for start in range(0, len(nodes), local)]
        apart = len(set(nodes)) == len(chunks) and all(len(chunk) == 1 for chunk in chunks)
        counts.add(local if apart and len(nodes) % local == 0 else None)
    return counts.pop() if len(counts) == 1 and grid.world_size % node == 0 else None


@pytest.mark.parametrize(
    ("grid", "node", "ranks"),
    [
        (Grid(sharding=16, ep=16), 8, 8),
        (Grid(sharding=8, mp=2, ep=8, emp=2), 8, 4),
        (Grid(sharding=2, mp=8, ep=2, emp=8), 8, 1),  # each rank of ep is on another node
        (Grid(dp=2, pp=2, sharding=8, ep=16), 8, 8),  # ep reaches over pp
        (Grid(dp=2, pp=2, sharding=8, ep=8), 8, 8),  # every group is on one node
        (Grid(sharding=24, ep=12), 8, None),
        (Grid(sharding=6, ep=6), 4, None),
        (Grid(sharding=4, cp=2, mp=2, ep=8, order=("mp", "dp", "pp", "sharding", "cp")), 8, None),
    ],
)
def test_ep_is_whole_nodes(grid: Grid, node: int, ranks: int | None) -> None:
    assert grid.ep_node_ranks(node) == ranks


@given(grids(), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_nodes_of_ep_are_those_of_every_group(grid: Grid, node: int) -> None:
    found = grid.ep_node_ranks(node)
    assert found is None or found == node_ranks_one_by_one(grid, node)
