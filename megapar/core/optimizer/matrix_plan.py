"""The plan by which the ranks of a stage orthogonalize its matrices, each whole on one rank.

The pieces of a matrix lie where its parameter's master shards lie. One of the ranks that have a piece owns the matrix:
it receives the other pieces, orthogonalizes the whole, and sends every rank with a piece its part of the result. Ranks
with the same piece are replicas: one of them sends, all receive. Work is balanced over the owners by its operations.
Matrices are dealt to rounds, in which no owner has more than a limit of elements.

    round 0  gather | orthogonalize            | scatter
    round 1         | gather                   | orthogonalize  | scatter
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megapar.core.box import Box
from megapar.core.sharding.cut import ParameterInfo


@dataclass(frozen=True)
class Matrix:
    """A matrix that Muon orthogonalizes.

    Attributes:
        parameter: Parameter that it is a part of.
        box: The part. Its elements, in row-major order, are the matrix [rows, columns].
    """

    parameter: ParameterInfo
    box: Box
    rows: int
    columns: int


def flops(rows: int, columns: int, steps: int) -> int:
    """Return the floating point operations of this many Newton-Schulz iterations of one matrix."""
    small, large = sorted((rows, columns))
    return steps * (4 * small * small * large + 2 * small**3)


class Piece(NamedTuple):
    """The part of a matrix that one rank has: of matrix number ``matrix`` of the stage."""

    matrix: int
    part: Box


@dataclass
class Round:
    """Work of this rank in a round. Lists by rank have an entry for each rank of the stage.

    Attributes:
        owned: Numbers of the matrices that it orthogonalizes.
        sent: By owner, the pieces that this rank sends.
        received: By sender, the pieces of the matrices that it owns.
        returned: By owner, the pieces of the results that this rank receives.
        given: By receiver, the pieces of its results.
    """

    owned: list[int]
    sent: list[list[Piece]]
    received: list[list[Piece]]
    returned: list[list[Piece]]
    given: list[list[Piece]]

    @classmethod
    def empty(cls, ranks: int) -> Round:
        """Return a round in which nothing is done."""
        sent, received, returned, given = ([list[Piece]() for _ in range(ranks)] for _ in range(4))
        return cls([], sent, received, returned, given)


@dataclass(frozen=True)
class MatrixPlan:
    """The rounds of one rank; all ranks of the stage have the same number of them.

    Attributes:
        owners: For each matrix, the place of its owner among the ranks of the stage.
    """

    rounds: tuple[Round, ...]
    owners: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True)
class Holders:
    """The ranks that have each piece of a matrix, by their places among those of the stage."""

    parts: Mapping[Box, Sequence[int]]

    @cached_property
    def part_of(self) -> Mapping[int, Box]:
        """The piece of each rank that has one, in ascending order of places."""
        return dict(sorted((place, part) for part, places in self.parts.items() for place in places))

    def sender(self, part: Box, owner: int) -> int:
        """Return the rank that sends a piece to the owner: of its replicas the nearest."""
        return min(self.parts[part], key=lambda place: (abs(place - owner), place))


class Dealt(NamedTuple):
    """A matrix in the plan of a stage: the ranks with its pieces, its owner, and the number of its round."""

    holders: Holders
    owner: int
    round: int


def plan_matrices(
    matrices: Sequence[Matrix],
    boxes: Callable[[ParameterInfo], Sequence[Box]],
    place: int,
    ranks: int,
    work: Callable[[Matrix], int],
    round_elements: int,
) -> MatrixPlan:
    """Return the plan of the rank at ``place`` of a stage's ranks. It is the same plan on all of them.

    Args:
        boxes: Returns the pieces of a parameter's master weights, of each rank of the stage.
        work: Operations that it takes to orthogonalize a matrix.
        round_elements: Most elements of the matrices that a rank has whole at a time, unless a single one is larger.
    """
    dealt = deal_matrices(matrices, StageHolders(boxes), ranks, work, round_elements)
    rounds = [Round.empty(ranks) for _ in range(1 + max((one.round for one in dealt), default=-1))]
    for index, one in enumerate(dealt):
        _enter(rounds[one.round], index, one.holders, one.owner, place)
    return MatrixPlan(tuple(rounds), tuple(one.owner for one in dealt))


class StageHolders:
    """The holders of a stage's matrices. Layers that are alike share theirs: large models have thousands of matrices.

    ``boxes`` returns the pieces of a parameter's master weights, of each rank of the stage.
    """

    def __init__(self, boxes: Callable[[ParameterInfo], Sequence[Box]]) -> None:
        self._boxes = boxes
        self._pieces: dict[object, _Pieces] = {}
        self._known: dict[object, Holders] = {}

    def of(self, matrix: Matrix) -> Holders:
        """Return the ranks that have the pieces of a matrix."""
        spec = matrix.parameter
        kind = spec.shape, spec.axes, spec.expert
        key = kind, matrix.box.offsets, matrix.box.sizes
        if key not in self._known:
            if kind not in self._pieces:
                self._pieces[kind] = _Pieces(self._boxes(spec))
            self._known[key] = self._pieces[kind].holders(matrix.box)
        return self._known[key]


class _Pieces:
    """The pieces of a parameter, each with the ranks that have it, in the order in which they cut its first dim."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        places: dict[Box, list[int]] = {}
        for place, box in enumerate(boxes):
            if box.numel:
                places.setdefault(box, []).append(place)
        self._places = sorted(places.items(), key=lambda item: item[0].offsets)
        self._starts = [box.offsets[0] for box, _ in self._places]
        self._ends = [box.offsets[0] + box.sizes[0] for box, _ in self._places]

    def holders(self, box: Box) -> Holders:
        """Return the ranks that have pieces of a part of the parameter."""
        first = bisect_right(self._ends, box.offsets[0])
        last = bisect_left(self._starts, box.offsets[0] + box.sizes[0])
        met = ((piece.meet(box), places) for piece, places in self._places[first:last])
        return Holders({part: places for part, places in met if part is not None})


def deal_matrices(
    matrices: Sequence[Matrix], holders: StageHolders, ranks: int, work: Callable[[Matrix], int], round_elements: int
) -> list[Dealt]:
    """Return the owner and the round of each matrix. The arguments are those of ``plan_matrices``."""
    all_holders = [holders.of(matrix) for matrix in matrices]
    owners = _deal(matrices, all_holders, ranks, work)
    held, number = [0] * ranks, [0] * ranks  # elements of each rank's current round, and that round's number
    dealt = []
    for matrix, held_by, owner in zip(matrices, all_holders, owners, strict=True):
        if held[owner] and held[owner] + matrix.box.numel > round_elements:
            held[owner], number[owner] = 0, number[owner] + 1
        held[owner] += matrix.box.numel
        dealt.append(Dealt(held_by, owner, number[owner]))
    return dealt


def _deal(
    matrices: Sequence[Matrix], holders: Sequence[Holders], ranks: int, work: Callable[[Matrix], int]
) -> list[int]:
    """Return the owner of each matrix: the largest first, to the holder that has the least work so far."""
    load, owners = [0] * ranks, [0] * len(matrices)
    operations = [work(matrix) for matrix in matrices]
    for index in sorted(range(len(matrices)), key=lambda i: (-operations[i], i)):
        owners[index] = min(holders[index].part_of, key=load.__getitem__)  # of equals the first
        load[owners[index]] += operations[index]
    return owners


def _enter(of: Round, index: int, holders: Holders, owner: int, place: int) -> None:
    """Enter a matrix into this rank's lists."""
    if place == owner:
        of.owned.append(index)
        for part, places in holders.parts.items():
            of.received[holders.sender(part, owner)].append(Piece(index, part))
            for other in places:
                of.given[other].append(Piece(index, part))
    if (own := holders.part_of.get(place)) is not None:
        of.returned[owner].append(Piece(index, own))
        if place == holders.sender(own, owner):
            of.sent[owner].append(Piece(index, own))
