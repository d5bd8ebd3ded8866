"""The order in which groups are made, as an accelerator needs it.

Under a bound device a group is made by a split of the world's communicator: every rank takes part in every split, in
the same order, and says by a color to which group it goes. So the k-th group that a rank makes is its part of the k-th
round of all ranks. Groups of gloo and fake ones are made by their own ranks alone and never show a breach.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import megapar.core.comm.world
from megapar.core.comm.world import World, axis_ranks
from megapar.core.device.base import Device
from megapar.core.grid import DENSE_AXES, Grid
from tests.test_configs import FILES, load

Made = tuple[str, tuple[int, ...]]  # what a group is called, and its ranks


def creations(grid: Grid, closings: Sequence[bool] = (False, True)) -> list[list[Made]]:
    """The groups that every rank makes at its start, in order, with the queues of pipelines on a line and in a ring."""

    @cache
    def whole(grid: Grid, axis: str) -> Mapping[int, tuple[int, ...]]:
        groups: dict[int, tuple[int, ...]] = {}
        for rank in range(grid.world_size):
            if rank not in groups:
                group = axis_ranks(grid, axis, rank)
                groups |= dict.fromkeys(group, group)
        return groups

    made: list[list[Made]] = []

    def new_group(ranks: Sequence[int], *, group_desc: str, **_: Any) -> object:
        made[-1].append((group_desc, tuple(ranks)))
        return SimpleNamespace()

    numbers = range(grid.world_size)
    with (
        patch.object(dist, "new_group", new_group),
        # Every rank would work out the same ranks again.
        patch.object(megapar.core.comm.world, "axis_ranks", lambda grid, axis, rank: whole(grid, axis)[rank]),
    ):
        for rank in numbers:
            made.append([])
            world = World(grid, rank, Device(), None, timedelta(1), numbers)
            for closed in closings:
                world.make_queues(closed=closed)
                world._queues.clear()
    return made


def breaches(made: Sequence[Sequence[Made]]) -> Iterator[str]:
    """What is no round of all ranks."""
    lengths = {len(own) for own in made}
    if len(lengths) > 1:
        yield f"ranks make {sorted(lengths)} groups"
    for number in range(min(lengths)):
        makers = Counter(own[number] for own in made)
        for rank, own in enumerate(made):
            name, ranks = own[number]
            if rank not in ranks or makers[name, ranks] != len(ranks):
                yield f"round {number}: rank {rank} makes {name} of {ranks}, as {makers[name, ranks]} ranks do"
        # The color that torch makes of a group's ranks.
        groups = {own[number][1] for own in made}
        if len({dist.distributed_c10d._process_group_color(list(ranks)) for ranks in groups}) < len(groups):
            yield f"round {number}: two groups have one color, and would become one"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_rank_of_every_preset_makes_its_groups_in_common_rounds(path: Path) -> None:
    made = creations(load(path).grid)
    assert len(made) > 1 or made == [[]]
    assert list(breaches(made)) == []


def small_grids() -> Iterator[Grid]:
    """All grids of up to twelve ranks in the order in which groups are made."""
    for sizes in product(range(1, 5), repeat=len(DENSE_AXES)):
        dense = dict(zip(DENSE_AXES, sizes, strict=True))
        for ep, emp in product((1, 2, 3, 4), (1, 2)):
            try:
                grid = Grid(**dense, ep=ep, emp=emp)
            except ValueError:
                continue
            if grid.world_size <= 12:
                yield grid


def test_every_small_grid_makes_its_groups_in_common_rounds() -> None:
    grids = list(small_grids())
    assert len(grids) > 300
    assert {str(grid): found for grid in grids if (found := list(breaches(creations(grid))))} == {}
