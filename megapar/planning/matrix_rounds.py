"""Rounds in which Muon puts matrices together: what a rank sends, orthogonalizes and holds, by the run's own plan.

The owner of a matrix depends on the work of all others (``core/optimizer/matrix_plan.py``), so that the ranks of a
stage differ. Bytes are those of its first rank, as of other axes; times are those of the rank with the most work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megapar.core.grid import Grid
from megapar.core.optimizer.matrix_plan import Dealt, Matrix, StageHolders, deal_matrices, flops
from megapar.model.cost.model_cost import Product
from megapar.model.parameter import ParameterSpec
from megapar.planning.planned_run import PlannedRun
from megapar.training.building.matrices import boxes_of, matrices_of


@dataclass
class MatrixRound:
    """Work of a rank in a round, in elements but for the last three.

    Attributes:
        sent: Pieces that it sends to the owners, itself included.
        given: Parts of its results that it sends to the holders, itself included.
        kept: Of both, the part that it sends to itself.
        returned: Parts of results that it receives, itself included.
        shapes: Number of matrices that it owns of each shape, (shorter, longer) side.
        received: Number of pieces that it receives.
        updated: Number of pieces that it updates.
    """

    sent: int = 0
    given: int = 0
    kept: int = 0
    returned: int = 0
    shapes: Counter[tuple[int, int]] = field(default_factory=Counter)
    received: int = 0
    updated: int = 0

    @property
    def whole(self) -> int:
        """Elements of the matrices that it owns."""
        return sum(count * short * long for (short, long), count in self.shapes.items())

    @property
    def held(self) -> int:
        """Elements of its messages, matrices and temporary tensors, while it orthogonalizes or packs results."""
        sizes = [(count * short * long, count * short * short) for (short, long), count in self.shapes.items()]
        iterating = max((2 * whole + 2 * gram for whole, gram in sizes), default=0)
        packing = max((whole for whole, _ in sizes), default=0) + self.given + self.returned
        return self.sent + 3 * self.whole + max(iterating, packing)

    def products(self, steps: int) -> list[Product]:
        """Return the products of its iterations: those of all matrices of a shape are one kernel."""
        made: list[Product] = []
        for (short, long), count in self.shapes.items():
            rows = short * count * steps
            sides = (long, short), (short, short), (short, long)
            made += [Product(rows, inner, out, wide=True) for inner, out in sides]
        return made


@dataclass(frozen=True)
class StageRounds:
    """The rounds of a stage: of its first rank, and of the rank with the most work; both have as many."""

    first: Sequence[MatrixRound] = ()
    busiest: Sequence[MatrixRound] = ()

    @property
    def sent(self) -> int:
        """Elements that the first rank sends to other ranks in a step."""
        return sum(one.sent + one.given - 2 * one.kept for one in self.first)

    @property
    def held(self) -> int:
        """Most elements that one of the two holds: of a round, of the gather after it and the scatter before it."""
        ranks = (self.first, self.busiest)
        return max((_held(rounds, number) for rounds in ranks for number in range(len(rounds))), default=0)


def _held(rounds: Sequence[MatrixRound], number: int) -> int:
    after = sum(one.sent + one.whole for one in rounds[number + 1 : number + 2])
    before = sum(one.given + one.returned for one in rounds[max(0, number - 1) : number])
    return rounds[number].held + after + before


def stage_rounds(run: PlannedRun, stage: int) -> StageRounds:
    """Return the rounds of a stage; none without Muon."""
    rows = [row for row in run.rows(stage) if row.matrix]
    if not rows:
        return StageRounds()
    grid, options = run.config.grid, run.config.optimizer
    alike = tuple((row.name.removeprefix(row.unit), row.shape) for row in rows)
    of_stage = Grid(dp=grid.dp, sharding=grid.sharding, cp=grid.cp, mp=grid.mp, ep=grid.ep, emp=grid.emp)
    steps, most = options.muon_num_ns_steps, run.kind.device_class.whole_elements
    key = "matrix rounds", alike, of_stage, run.cuts_parameters, options.muon_qkv_split, steps, most

    def work(matrix: Matrix) -> int:
        return flops(matrix.rows, matrix.columns, steps)

    def make() -> StageRounds:
        matrices = _matrices(run, rows)
        ranks = range(of_stage.world_size)
        boxes = boxes_of(of_stage, ranks, full=run.cuts_parameters)
        holders = run.shared.get(("holders", of_stage, run.cuts_parameters), lambda: StageHolders(boxes))
        dealt = deal_matrices(matrices, holders, len(ranks), work, most)
        load = Counter[int]()
        for one, matrix in zip(dealt, matrices, strict=True):
            load[one.owner] += work(matrix)
        busiest = min(load, key=lambda place: (-load[place], place))
        return StageRounds(_rounds(matrices, dealt, 0), _rounds(matrices, dealt, busiest))

    return run.shared.get(key, make)


def _matrices(run: PlannedRun, rows: Sequence[ParameterSpec]) -> list[Matrix]:
    """Return the matrices of a stage; layers that are alike share them."""
    known: dict[Any, list[Matrix]] = {}
    found: list[Matrix] = []
    for row in rows:
        key = row.name.removeprefix(row.unit), row.shape
        if key not in known:
            known[key] = matrices_of(row, run.config.optimizer.muon_qkv_split)
        found += known[key]
    return found


def _rounds(matrices: Sequence[Matrix], dealt: Sequence[Dealt], place: int) -> list[MatrixRound]:
    rounds = [MatrixRound() for _ in range(1 + max(one.round for one in dealt))]
    for matrix, (holders, owner, number) in zip(matrices, dealt, strict=True):
        if (own := holders.part_of.get(place)) is None:
            continue
        now = rounds[number]
        now.returned += own.numel
        now.updated += 1
        if owner == place:
            now.kept += own.numel
            now.given += sum(part.numel * len(places) for part, places in holders.parts.items())
            now.shapes[min(matrix.rows, matrix.columns), max(matrix.rows, matrix.columns)] += 1
            now.received += len(holders.parts)
        if holders.sender(own, owner) == place:
            now.sent += own.numel
    return rounds
