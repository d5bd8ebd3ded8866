"""Random tokens instead of a corpus, for benchmarks and for tests without text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megapar.data.sampling.draws import Draws

if TYPE_CHECKING:
    import numpy as np

PIECES = 1 << 20


class RandomPieces:
    """Pieces of random ids; both ids and lengths are distributed uniformly."""

    def __init__(
        self, ids: np.ndarray, shortest: int, longest: int, seed: int, stream: str, *, end: int | None = None
    ) -> None:
        """Take the distribution of the pieces.

        Args:
            ids: [..] int64, the ids to draw from.
            shortest: Minimum length of a piece, in ids.
            longest: Maximum length of a piece, in ids.
            seed: Seed of the ids.
            stream: Separates training from held-out pieces.
            end: An end token, with which each position is replaced with probability min(1/4, 4 / length).
        """
        self._ids = ids
        self._shortest = shortest
        self._longest = longest
        self._seed = seed
        self._stream = f"mock/{stream}"
        self._end = end

    def __len__(self) -> int:
        return PIECES

    def document(self, number: int) -> int:
        """Return the piece's number, because every piece is a document."""
        return number

    def __getitem__(self, number: int) -> np.ndarray:
        import numpy as np

        draws = Draws(self._seed, self._stream, number)
        length = self._shortest + draws.integer(self._longest - self._shortest + 1)
        ids = np.asarray(self._ids[draws.integers(length, len(self._ids))])
        return ids if self._end is None else np.where(draws.uniform(length) < min(0.25, 4 / length), self._end, ids)
