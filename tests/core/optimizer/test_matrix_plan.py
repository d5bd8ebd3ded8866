"""The plan by which matrices are put together, on all ranks of a stage at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

import pytest

from megapar.core.box import Box
from megapar.core.grid import Grid
from megapar.core.optimizer.matrix_plan import Matrix, MatrixPlan, Piece, flops, plan_matrices
from megapar.core.sharding.cut import ParameterInfo, master_box
from megapar.model.parameter import ParameterSpec

DENSE = ParameterSpec("w", (12, 20), (("mp", 0),), "layers.0", "normal", decay=True)
COPIED = ParameterSpec("copied", (8, 20), (), "layers.0", "normal", decay=True)
EXPERTS = ParameterSpec("experts", (4, 6, 10), (("ep", 0), ("emp", 1)), "layers.0", "normal", decay=True, expert=True)
GRIDS = {
    "alone": Grid(),
    "sharding and mp": Grid(sharding=2, mp=2),
    "replicas": Grid(dp=2, sharding=3),
    "experts": Grid(dp=2, sharding=2, mp=2, ep=2, emp=2),
    "stages": Grid(pp=2, sharding=2, cp=2),
}


def matrices() -> list[Matrix]:
    experts = [Matrix(EXPERTS, Box((number, 0, 0), (1, 6, 10)), 6, 10) for number in range(4)]
    return [Matrix(DENSE, Box.whole(DENSE.shape), 12, 20), Matrix(COPIED, Box.whole(COPIED.shape), 8, 20), *experts]


def plans(grid: Grid, most: int = 1 << 20, full: bool = False) -> tuple[list[MatrixPlan], list[int]]:
    """Return the plans of the ranks of the first stage, and these ranks."""
    ranks = [rank for rank in range(grid.world_size) if grid.coordinates(rank)["pp"] == 0]

    def boxes(spec: ParameterInfo) -> Sequence[Box]:
        return [master_box(spec, grid, rank, full=full) for rank in ranks]

    def work(matrix: Matrix) -> int:
        return flops(matrix.rows, matrix.columns, 5)

    return [plan_matrices(matrices(), boxes, place, len(ranks), work, most) for place in range(len(ranks))], ranks


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("most", [1, 300, 1 << 20])
@pytest.mark.parametrize("name", GRIDS)
def test_every_piece_arrives_once_and_every_holder_gets_its_own_back(name: str, most: int, full: bool) -> None:
    grid = GRIDS[name]
    made, ranks = plans(grid, most, full)
    assert len({plan.owners for plan in made}) == len({len(plan.rounds) for plan in made}) == 1
    arrived: Counter[int] = Counter()
    for rounds in zip_longest(*(plan.rounds for plan in made)):
        for place, of in enumerate(rounds):
            for other, their in enumerate(rounds):
                assert of.sent[other] == their.received[place]
                assert of.given[other] == their.returned[place]
            for piece in (piece for row in of.received for piece in row):
                assert piece.matrix in of.owned
                arrived[piece.matrix] += piece.part.numel
    assert arrived == {number: matrix.box.numel for number, matrix in enumerate(matrices())}
    for place, rank in enumerate(ranks):
        back = [piece for of in made[place].rounds for row in of.returned for piece in row]
        held = [
            Piece(number, part)
            for number, matrix in enumerate(matrices())
            if (part := master_box(matrix.parameter, grid, rank, full=full).meet(matrix.box)) is not None
        ]
        assert sorted(back, key=lambda piece: piece.matrix) == held


def test_a_round_has_no_more_than_its_limit_unless_one_matrix_is_larger() -> None:
    (plan,), _ = plans(GRIDS["alone"], 130)
    sizes = [[matrices()[number].box.numel for number in of.owned] for of in plan.rounds]
    assert sizes == [[240], [160], [60, 60], [60, 60]]


def test_work_is_dealt_to_the_ranks_that_have_pieces() -> None:
    made, _ = plans(GRIDS["experts"])
    owned = Counter(made[0].owners)
    assert len(owned) == 6  # matrices of eight ranks, each to another rank
    assert all(number in made[owner].rounds[0].owned for number, owner in enumerate(made[0].owners))


def test_a_replica_near_the_owner_sends() -> None:
    made, _ = plans(GRIDS["replicas"])
    owner = made[0].owners[0]
    senders = [place for place, plan in enumerate(made) if any(p.matrix == 0 for p in plan.rounds[0].sent[owner])]
    assert {place // 3 for place in senders} == {owner // 3}  # all of the owner's replica
