"""Sentence reordering: a piece is cut into 1 to m parts and permuted; its class is the permutation.

    class   0 | 1 2 | 3 4 5 6 7 8 | ..        permutations of 1, of 2, of 3 parts, in lexicographic order

Items: samples. Metric: accuracy. Source: ERNIE 3.0 (arXiv 2107.02137), section 3.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import factorial

from megapar.data.sampling.draws import Draws
from megapar.data.sampling.frame import Frame
from megapar.data.sampling.samples import Sample, TokenPieces
from megapar.data.tasks.task import cut_evenly
from megapar.model.ernie3.tasks import REORDER, reorder_classes


@dataclass(frozen=True)
class SentenceReorder:
    """Samples of sentence reordering.

    Attributes:
        pieces: Pieces of at most S - 2 ids.
        frame: The form of the samples.
        most: m, the maximum number of parts.
        name: Name of the task.
    """

    pieces: TokenPieces
    frame: Frame
    most: int
    name: str = REORDER

    def make(self, number: int, draws: Draws) -> Sample:
        """Return a sample of the permuted piece, with its class."""
        import numpy as np

        ids = self.pieces[number]
        count = min(1 + draws.integer(self.most), len(ids))
        order = permutation(draws.integer(factorial(count)), count)
        parts = cut_evenly(self.frame.marks.word_starts(ids), count)
        shown = np.concatenate([ids[parts[place]] for place in order])
        return self.frame.sample((shown, None), label=class_of(order))


def permutation(rank: int, count: int) -> tuple[int, ...]:
    """Return the permutation of 0 .. count - 1 with this rank in lexicographic order."""
    left, order = list(range(count)), []
    for size in range(count, 0, -1):
        place, rank = divmod(rank, factorial(size - 1))
        order.append(left.pop(place))
    return tuple(order)


def class_of(order: Sequence[int]) -> int:
    """Return the class of a permutation; those of fewer parts are first."""
    left, rank = sorted(order), 0
    for place in order:
        rank = rank * len(left) + left.index(place)
        left.remove(place)
    return reorder_classes(len(order) - 1) + rank
