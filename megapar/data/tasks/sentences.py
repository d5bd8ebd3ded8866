"""Objectives on the text of documents: next tokens, the order of sentences, and the distance between two of them.

Source: ERNIE 3.0 (arXiv 2107.02137).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import factorial
from typing import Protocol

from megapar.data.lazy_numpy import np
from megapar.data.sampling.draws import Draws
from megapar.data.sampling.ernie import Frame
from megapar.data.sampling.samples import NO_LOSS, DocumentPieces, Sample, TokenPieces, nearby
from megapar.errors import DataError
from megapar.model.ernie3.sizes import DISTANCE, DISTANCES, DOCUMENT_LM, REORDER, reorder_classes


class Task(Protocol):
    """One pre-training objective."""

    @property
    def name(self) -> str:
        """Name of the task in ``model.ernie3.sizes``."""

    def make(self, number: int, draws: Draws) -> Sample:
        """Return sample ``number`` of this task; it depends only on the number and on ``draws``."""


def cut_evenly(starts: np.ndarray, parts: int) -> list[slice]:
    """Cut T ids into ``parts`` pieces of nearly equal length, each at the word start nearest to the equal cut.

    ``starts`` [T] bool is True at the first id of each word; where none can be used, a cut falls inside a word. Every
    piece has at least one id, so T must be at least ``parts``.
    """
    length, places = len(starts), np.flatnonzero(starts)
    edges = [0]
    for part in range(1, parts):
        wanted, low, high = length * part // parts, edges[-1] + 1, length - (parts - part)
        near = places[(places >= low) & (places <= high)]
        edges.append(int(near[np.abs(near - wanted).argmin()]) if len(near) else min(max(wanted, low), high))
    return [slice(a, b) for a, b in zip(edges, (*edges[1:], length), strict=True)]


@dataclass(frozen=True)
class DocumentLm:
    """Document language model: every next token of a piece, left to right, in the generation branch.

    Pieces have at most S - 2 ids. Items: predicted tokens. Metric: their cross-entropy. Source: section 3.2.1.
    """

    pieces: TokenPieces
    frame: Frame
    name: str = DOCUMENT_LM

    def make(self, number: int, draws: Draws) -> Sample:
        """Return [CLS] a b c [SEP] with the labels a b c [SEP] and, at the last position, NO_LOSS."""
        ids = self.pieces[number]
        sample = self.frame.sample((ids, None))
        sample["labels"][: len(ids) + 1] = sample["tokens"][1 : len(ids) + 2]
        sample["labels"][len(ids) + 1 :] = NO_LOSS
        return sample


@dataclass(frozen=True)
class SentenceReorder:
    """Sentence reordering: a piece is cut into 1 to m parts and permuted; its class is the permutation.

        class   0 | 1 2 | 3 4 5 6 7 8 | ..        permutations of 1, of 2, of 3 parts, in lexicographic order

    Pieces have at most S - 2 ids; ``most`` is m. Items: samples. Metric: accuracy. Source: section 3.2.2.
    """

    pieces: TokenPieces
    frame: Frame
    most: int
    name: str = REORDER

    def make(self, number: int, draws: Draws) -> Sample:
        """Return a sample of the permuted piece, with its class."""
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


ADJACENT, SAME, OTHER = range(DISTANCES)
_TRIES = 16  # random draws of another document before a fixed fallback


@dataclass(frozen=True)
class SentenceDistance:
    """Sentence distance: two parts are adjacent (0), separate in one document (1), or from different documents (2).

        document   a b c     0: a b, or b c     1: a c     2: a and a part of another document

    All parts are thirds of pieces, so that lengths do not reveal the class. Pieces have 3 to S - 3 ids and are from at
    least two documents. Items: samples. Metric: accuracy. Source: section 3.2.2.
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
