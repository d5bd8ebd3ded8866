"""Sentence distance: are two parts adjacent (0), of one document but apart (1), or of different documents (2)?

    document   a b c     0: a b, or b c     1: a c     2: a and a part of another document

All parts are thirds of pieces, so that lengths reveal nothing. Items: samples. Metric: accuracy.
Source: ERNIE 3.0 (arXiv 2107.02137), section 3.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megapar.data.sampling.draws import Draws
from megapar.data.sampling.frame import Frame
from megapar.data.sampling.samples import Sample, beside
from megapar.data.tasks.task import DocumentPieces, cut_evenly
from megapar.errors import DataError
from megapar.model.ernie3.tasks import DISTANCE, DISTANCES

if TYPE_CHECKING:
    import numpy as np

ADJACENT, SAME, OTHER = range(DISTANCES)
_TRIES = 16  # draws of another document before the pieces are walked through


@dataclass(frozen=True)
class SentenceDistance:
    """pieces: of 3 to S - 3 ids, of at least two documents."""

    pieces: DocumentPieces
    frame: Frame
    name: str = DISTANCE

    def __post_init__(self) -> None:
        # Pieces are in the order of their documents.
        if self.pieces.document(0) == self.pieces.document(len(self.pieces) - 1):
            raise DataError(f"{DISTANCE} needs sentences of different documents, and the corpus holds one document")

    def make(self, number: int, draws: Draws) -> Sample:
        """Two parts, and how far they are apart."""
        ids, kind, which = self.pieces[number], draws.integer(DISTANCES), draws.integer(2)
        first, middle, last = (ids[part] for part in self._thirds(ids))
        if kind == ADJACENT:
            pair = (first, middle) if which == 0 else (middle, last)
        elif kind == SAME:
            pair = (first, last)
        else:
            other = self.pieces[self._elsewhere(number, draws)]
            pair = (first, other[self._thirds(other)[1 + which]])
        # Where words are long, thirds are uneven, and those of two pieces may be more than one.
        room = self.frame.pair_room - len(pair[0])
        return self.frame.sample((pair[0], None), (pair[1][:room], None), label=kind)

    def _thirds(self, ids: np.ndarray) -> list[slice]:
        return cut_evenly(self.frame.marks.word_starts(ids), 3)

    def _elsewhere(self, number: int, draws: Draws) -> int:
        """A piece of another document."""
        here, near = self.pieces.document(number), beside(self.pieces, number)
        for _ in range(_TRIES):
            other = near[draws.integer(len(near))]
            if self.pieces.document(other) != here:
                return other
        ends = (near[0], near[-1], 0, len(self.pieces) - 1)
        return next(other for other in ends if self.pieces.document(other) != here)
