"""Sentence distance: two parts are adjacent (0), separate in one document (1), or from different documents (2).

    document   a b c     0: a b, or b c     1: a c     2: a and a part of another document

All parts are thirds of pieces, so that lengths do not reveal the class. Items: samples. Metric: accuracy.
Source: ERNIE 3.0 (arXiv 2107.02137), section 3.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megapar.data.sampling.draws import Draws
from megapar.data.sampling.frame import Frame
from megapar.data.sampling.samples import DocumentPieces, Sample, nearby
from megapar.data.tasks.task import cut_evenly
from megapar.errors import DataError
from megapar.model.ernie3.tasks import DISTANCE, DISTANCES

if TYPE_CHECKING:
    import numpy as np

ADJACENT, SAME, OTHER = range(DISTANCES)
_TRIES = 16  # random draws of another document before a fixed fallback


@dataclass(frozen=True)
class SentenceDistance:
    """Samples of sentence distance.

    Attributes:
        pieces: Pieces of 3 to S - 3 ids, from at least two documents.
        frame: The form of the samples.
        name: Name of the task.
    """

    pieces: DocumentPieces
    frame: Frame
    name: str = DISTANCE

    def __post_init__(self) -> None:
        # Pieces are in the order of their documents.
        if self.pieces.document(0) == self.pieces.document(len(self.pieces) - 1):
            raise DataError(f"{DISTANCE} needs sentences of different documents, but the corpus has only one document")

    def make(self, number: int, draws: Draws) -> Sample:
        """Return a sample of two parts, whose class is their distance."""
        ids, kind, which = self.pieces[number], draws.integer(DISTANCES), draws.integer(2)
        first, middle, last = (ids[part] for part in self._thirds(ids))
        if kind == ADJACENT:
            pair = (first, middle) if which == 0 else (middle, last)
        elif kind == SAME:
            pair = (first, last)
        else:
            other = self.pieces[self._of_other_document(number, draws)]
            pair = (first, other[self._thirds(other)[1 + which]])
        # With long words thirds are uneven, and two of them from different pieces may exceed the sample.
        room = self.frame.pair_room - len(pair[0])
        return self.frame.sample((pair[0], None), (pair[1][:room], None), label=kind)

    def _thirds(self, ids: np.ndarray) -> list[slice]:
        return cut_evenly(self.frame.marks.word_starts(ids), 3)

    def _of_other_document(self, number: int, draws: Draws) -> int:
        """Return the number of a piece of another document."""
        document, candidates = self.pieces.document(number), nearby(self.pieces, number)
        for _ in range(_TRIES):
            other = candidates[draws.integer(len(candidates))]
            if self.pieces.document(other) != document:
                return other
        ends = (candidates[0], candidates[-1], 0, len(self.pieces) - 1)
        return next(other for other in ends if self.pieces.document(other) != document)
