"""Who masters what: every element of every parameter exactly once among the ranks that answer for it."""

from dataclasses import dataclass

import numpy as np
import pytest

from megapar.core.grid import Grid
from megapar.core.sharding.cut import is_primary, local_box, master_box, shard_dim


@dataclass(frozen=True)
class Spec:
    shape: tuple[int, ...]
    axes: tuple[tuple[str, int], ...] = ()
    expert: bool = False
    name: str = "w"
    unit: str = "u"
    decay: bool = True
    fp32: bool = False
    router: bool = False
    stage: int = 0


SPECS = [
    Spec((8, 12)),
    Spec((5, 3)),
    Spec((7,)),
    Spec((6,), (("mp", 0),)),  # as sinks
    Spec((8, 12), (("mp", 0),)),
    Spec((12, 8), (("mp", 1),)),
    Spec((4, 2, 6, 8), (("ep", 0), ("emp", 2)), expert=True),
]
GRIDS = [
    Grid(),
    Grid(sharding=4),
    Grid(dp=2, sharding=3),
    Grid(sharding=2, mp=2, emp=2, ep=2),
    Grid(dp=2, sharding=2, mp=2, ep=4),
    Grid(dp=2, sharding=2, mp=2, ep=8),
    Grid(sharding=2, cp=2, ep=2, order=("sharding", "dp", "pp", "cp", "mp")),
]


@pytest.mark.parametrize("grid", GRIDS, ids=lambda g: g.describe())
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.shape}{s.axes}")
def test_primary_masters_cover_every_element_once(grid: Grid, spec: Spec) -> None:
    counts = np.zeros(spec.shape, dtype=int)
    for rank in range(grid.world_size):
        if is_primary(spec, grid, rank):
            counts[master_box(spec, grid, rank).slices] += 1
    assert (counts == 1).all()


@pytest.mark.parametrize("grid", GRIDS, ids=lambda g: g.describe())
def test_masters_are_cut_in_the_order_of_the_group_that_shards_them(grid: Grid) -> None:
    for spec in SPECS:
        for rank in range(grid.world_size):
            group, whole = grid.shard_group(rank, expert=spec.expert), local_box(spec, grid, rank)
            cut = whole.cut(shard_dim(whole.sizes, len(group)), len(group), group.index(rank))
            assert master_box(spec, grid, rank) == cut


@pytest.mark.parametrize("grid", GRIDS, ids=lambda g: g.describe())
def test_a_master_lies_inside_what_its_rank_computes_with(grid: Grid) -> None:
    for spec in SPECS:
        for rank in range(grid.world_size):
            box = master_box(spec, grid, rank)
            assert box.numel == 0 or box.meet(local_box(spec, grid, rank)) == box


def test_sharding_takes_the_largest_dim_that_divides() -> None:
    assert shard_dim((1, 2, 512, 256), 4) == 2
    assert shard_dim((6, 6), 3) == 0
    assert shard_dim((5, 7), 4) == 1  # 8 for 7 wastes less than 8 for 5
    assert shard_dim((5, 7), 4, full=True) == 0
    assert shard_dim((8, 10, 128, 8192), 168) == 3
    assert shard_dim((4, 7), 4) == 0
