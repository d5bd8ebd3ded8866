"""Groups on nodes: by arithmetic as by counting their ranks."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from megapar.core.grid import DENSE_AXES, Grid
from megapar.planning.traffic import Link, link


def groups(grid: Grid) -> dict[str, tuple[int, ...]]:
    """The groups of rank 0, rank by rank."""
    found = {axis: grid.group(axis, 0) for axis in (*DENSE_AXES, "ep", "emp", "edp")}
    for prefix, expert in (("", False), ("expert_", True)):
        found[f"{prefix}shard"] = grid.shard_group(0, expert=expert)
        found[f"{prefix}replica"] = grid.replica_group(0, expert=expert)
    return {**found, "world": tuple(range(grid.world_size))}


def grids(draw: random.Random, count: int) -> list[Grid]:
    found: list[Grid] = []
    while len(found) < count:
        order = tuple(draw.sample(DENSE_AXES, 5)) if draw.random() < 0.5 else DENSE_AXES
        sizes = {axis: draw.choice((1, 2, 3, 4)) for axis in DENSE_AXES}
        try:
            ep, emp = draw.choice((1, 2, 3, 4, 6, 8, 16)), draw.choice((1, sizes["mp"]))
            found.append(Grid(**sizes, ep=ep, emp=emp, order=order))
        except ValueError:
            continue  # no such expert groups on these ranks
    return found


@pytest.mark.parametrize("node", [1, 6, 8])
def test_links_are_those_of_the_groups_ranks(node: int) -> None:
    for grid in grids(random.Random(node), 60):
        for axis, ranks in groups(grid).items():
            nodes = Counter(rank // node for rank in ranks)
            found = link(grid, axis, node)
            assert (found.ranks, found.local, found.nodes) == (len(ranks), max(nodes.values()), len(nodes)), (
                grid,
                axis,
            )


def test_the_hops_of_a_dispatch_by_node_are_on_links_of_their_own() -> None:
    grid = Grid(sharding=32, ep=32)
    assert link(grid, "ep_between", 8) == Link("ep_between", 4, 1, 4)
    assert link(grid, "ep_within", 8) == Link("ep_within", 8, 8, 1)
    assert link(grid, "ep_between", 8).outside("all_to_all") == 1
    assert link(grid, "ep_within", 8).outside("all_to_all") == 0
