"""Counts of the pieces of documents, and the document of each piece, by sparse prefix sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megapar.data.lazy_numpy import np
from megapar.errors import DataError

STRIDE = 1024  # documents between two stored sums
_BLOCK = STRIDE << 10  # documents read at a time


class PieceCounts:
    """The number of pieces before every 1,024th document; sums between them are computed when they are needed.

    Takes one pass over the lengths of all documents, and 8 bytes per 1,024 documents.
    """

    def __init__(self, offsets: Any, pieces_of: Callable[[np.ndarray], np.ndarray]) -> None:
        """Count the pieces of all documents.

        Args:
            offsets: [D + 1], the index where each document begins, read in slices.
            pieces_of: Maps lengths [n] int64 of documents to counts [n] of pieces.
        """
        self._offsets = offsets
        self._pieces_of = pieces_of
        self._documents = len(offsets) - 1
        sums = [np.zeros(1, dtype=np.int64)]
        for start in range(0, self._documents, _BLOCK):
            counts = self._counts(start, min(start + _BLOCK, self._documents))
            ends = np.cumsum(np.add.reduceat(counts, np.arange(0, len(counts), STRIDE)))
            sums.append(sums[-1][-1] + ends)
        self._sums = np.concatenate(sums)

    @property
    def total(self) -> int:
        """Number of pieces of all documents."""
        return int(self._sums[-1])

    def find(self, number: int) -> tuple[int, int, int]:
        """Return (document, index among its pieces, number of its pieces) of piece ``number``, 0 <= number < total."""
        stretch = int(np.searchsorted(self._sums, number, side="right")) - 1
        first = stretch * STRIDE
        counts = self._counts(first, min(first + STRIDE, self._documents))
        until = np.cumsum(counts)
        rest = number - int(self._sums[stretch])
        document = int(np.searchsorted(until, rest, side="right"))
        pieces = int(counts[document])
        return first + document, rest - (int(until[document]) - pieces), pieces

    def _counts(self, first: int, last: int) -> np.ndarray:
        lengths = np.diff(np.asarray(self._offsets[first : last + 1], dtype=np.int64))
        if (lengths < 0).any():
            document = first + int(np.argmax(lengths < 0))
            raise DataError(
                f"document {document} of the corpus ends {-int(lengths[document - first])} tokens before it begins: "
                "its index is damaged; run megapar data check PREFIX to find the place"
            )
        return self._pieces_of(lengths)
