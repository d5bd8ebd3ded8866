"""The split of documents into training and held-out ones, and a pair of values for the two sides."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from megapar.data.lazy_numpy import np
from megapar.errors import DataError

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class TrainHeldout(Generic[T]):
    """One value for the training documents and one for the held-out ones, which is None if there are none."""

    train: T
    heldout: T | None

    def map(self, function: Callable[[T], U]) -> TrainHeldout[U]:
        """Apply a function to both values."""
        return TrainHeldout(function(self.train), None if self.heldout is None else function(self.heldout))


@dataclass(frozen=True)
class Split:
    """Shares of the documents, as ranges of [0, 1) into which the hash of each text falls.

    Files of tokens without hashes of their texts are split by the documents' numbers instead.

    Attributes:
        train: Share of the training documents.
        heldout: Share of the held-out documents, may be 0; the remaining documents are not used.
    """

    train: float
    heldout: float

    @classmethod
    def parse(cls, text: str) -> Split:
        """Parse ``95,5`` or ``969,30,1``: weights of training, held-out and unused documents. Raises DataError."""
        try:
            weights = [float(part) for part in text.split(",")]
        except ValueError:
            weights = []
        if len(weights) not in (2, 3) or min(weights) < 0 or weights[0] <= 0:
            raise DataError(
                f"the split {text!r} is not two or three weights, the first one above 0; write 95,5 or 969,30,1"
            )
        return cls(weights[0] / sum(weights), weights[1] / sum(weights))

    @property
    def trains_all(self) -> bool:
        """True if all documents are for training."""
        return self.heldout == 0 and self.train > 1 - 1e-9

    def side(self, text: str) -> int | None:
        """Return 0 if the text is for training, 1 if it is held out, None if it is not used."""
        place = place_of(text)
        if place < self.train or self.trains_all:
            return 0
        if self.heldout == 0:
            return None
        return 1 if place < self.train + self.heldout or self.train + self.heldout > 1 - 1e-9 else None

    def sides(self, places: np.ndarray) -> np.ndarray:
        """Return [n] int8, the ``side`` of documents by their places in [0, 1); -1 if a document is not used."""
        rest_held_out = self.train + self.heldout > 1 - 1e-9
        sides = np.full(len(places), -1, dtype=np.int8)
        if self.heldout:
            sides[(places < self.train + self.heldout) | rest_held_out] = 1
        sides[(places < self.train) | self.trains_all] = 0
        return sides

    def cuts(self, documents: int) -> tuple[int, int]:
        """Return the number of the document where training ends, and the one where the held-out documents end."""
        train = round(documents * self.train)
        return train, max(train, min(documents, round(documents * (self.train + self.heldout))))


def place_of(text: str) -> float:
    """Return the place of a document in [0, 1): a hash of its text, so that copies are always on the same side."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") / 2**64
