"""Pieces of matrices: the masters of each rank of a stage."""

from __future__ import annotations

from megapar.core.grid import Grid
from megapar.core.sharding.cut import master_box
from megapar.model.parameter import ParameterSpec
from megapar.training.building.matrices import boxes_of

DENSE = ParameterSpec("w", (12, 20), (("mp", 0),), "layers.0", "normal", decay=True)
EXPERTS = ParameterSpec("experts", (4, 6, 10), (("ep", 0),), "layers.0", "normal", decay=True, expert=True)


def test_parameters_that_are_cut_alike_share_their_pieces() -> None:
    grid = Grid(sharding=2, mp=2, ep=2)
    boxes = boxes_of(grid, range(4), full=False)
    for spec in (DENSE, EXPERTS):
        assert boxes(spec) == [master_box(spec, grid, rank) for rank in range(4)]
    other = ParameterSpec("v", DENSE.shape, DENSE.axes, "layers.1", "normal", decay=False)
    assert boxes(other) is boxes(DENSE) is not boxes(EXPERTS)
